// What all parts of the page use: elements, messages, and requests to the server.

export const $ = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function button(text, press, attributes = {}) {
  return element("button", { type: "button", onclick: press, ...attributes }, text);
}

export function say(text) {
  $("status").textContent = text;
}

export function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

let undoing = null;

// Shows what was done for some seconds, with a button that undoes it.
export function offerUndo(text, undo) {
  clearTimeout(undoing);
  const hide = () => ($("undo").hidden = true);
  const press = () => {
    hide();
    undo();
  };
  $("undo").replaceChildren(element("span", {}, text), button("Undo", press));
  $("undo").hidden = false;
  say(`${text}. Undo is possible.`);
  undoing = setTimeout(hide, 20000);
}

export async function copyText(text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    // A page without TLS has no clipboard.
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied");
}

export function downloadText(name, text, type) {
  const link = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- requests

export class Refused extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function call(path, body, signal) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
    const request = body ? { method: "POST", body: JSON.stringify(body), headers, signal } : { headers, signal };
    let response;
    try {
      response = await fetch(path, request);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("the server cannot be reached");
    }
    if (response.ok) return response;
    if (response.status === 401) await askToken(token ? "This token is wrong. Enter another one." : "");
    else throw await refusalOf(response);
  }
}

async function refusalOf(response) {
  const text = await response.text();
  try {
    const { message, code } = JSON.parse(text).error;
    return new Refused(message, response.status, code);
  } catch {
    return new Refused(`status ${response.status}`, response.status, null);
  }
}

let asking = null;

function askToken(mistake) {
  asking ??= new Promise((resolve, reject) => {
    $("token-mistake").textContent = mistake;
    $("token-mistake").hidden = !mistake;
    const given = () => {
      asking = null;
      const token = $("token").value.trim();
      $("token").value = "";
      if ($("ask-token").returnValue !== "continue" || !token) return reject(new Error("the server needs a token"));
      sessionStorage.setItem("token", token);
      resolve();
    };
    $("ask-token").returnValue = "";
    $("ask-token").addEventListener("close", given, { once: true });
    $("ask-token").showModal();
  });
  return asking;
}

// Yields the objects of a stream of server-sent events.
export async function* events(path, body, signal) {
  const response = await call(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await readOf(reader, signal);
    if (done) throw new Error("the server closed the connection");
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message, 200, event.error.code);
      yield event;
    }
  }
}

async function readOf(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("the connection to the server was lost");
  }
}
