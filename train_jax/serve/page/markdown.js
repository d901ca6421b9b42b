// Markdown of a model as elements. What a model writes is not trusted: HTML in it is shown as text, and what the parser
// makes is sanitised. Images are shown as their descriptions, since an address in them would be asked for.

import DOMPurify from "/vendor/purify.js";
import { Marked } from "/vendor/marked.js";

const TAGS = [
  "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ALLOWED = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function escaped(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text }) => escaped(text),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

export function markdown(text) {
  const made = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const link of made.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    else {
      link.rel = "noopener noreferrer nofollow";
      link.target = "_blank";
    }
  }
  // A long line of code or a wide table scrolls; the keyboard reaches it, too.
  for (const wide of made.querySelectorAll("pre, table")) {
    const box = document.createElement("div");
    box.className = "wide";
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", wide.localName === "pre" ? "Code" : "Table");
    wide.replaceWith(box);
    box.append(wide);
  }
  return made;
}
