// What the browser keeps: settings, and each conversation under a key of its own, so that two tabs that talk at the same
// time do not overwrite each other.

const SETTINGS = "trm-serve:settings";
const CONVERSATION = "trm-serve:conversation:";
const BEFORE = "trm-serve"; // one conversation and the settings, as older versions kept them

export const settings = {
  temperature: 0.6, top_p: 1, max_tokens: null, seed: null, tokens: false, theme: "light dark", view: null, models: null,
};

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

export function restoreSettings() {
  const before = read(BEFORE);
  if (before) {
    localStorage.removeItem(BEFORE);
    Object.assign(settings, { models: before.models ?? null });
    for (const name of Object.keys(settings)) settings[name] = before.settings?.[name] ?? settings[name];
    saveSettings();
    if (before.turns?.length) store({ ...fresh(), turns: before.turns.map(turnOfBefore) });
  }
  Object.assign(settings, read(SETTINGS));
}

function turnOfBefore({ question, answers }) {
  const converted = Object.entries(answers).map(([model, { step, versions }]) => {
    const list = Object.entries(versions).map(([of, version]) => ({ ...version, step: Number(of), finish: version.finish ?? "stopped" }));
    return [model, { shown: Math.max(0, list.findIndex((each) => each.step === step)), versions: list }];
  });
  return { question, answers: Object.fromEntries(converted) };
}

export function saveSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // The next visit begins with the defaults.
  }
}

export function fresh() {
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { id: [...random].map((each) => each.toString(36)).join(""), system: "", turns: [], saved: 0 };
}

export function load(id) {
  const found = read(CONVERSATION + id);
  return Array.isArray(found?.turns) ? found : null;
}

// Returns false if the browser keeps no more.
export function store(conversation) {
  conversation.saved = Date.now();
  try {
    localStorage.setItem(CONVERSATION + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(CONVERSATION + id);
}

export function isOf(key, id) {
  return key === CONVERSATION + id;
}

// All conversations, the newest first.
export function all() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(CONVERSATION)).map((key) => key.slice(CONVERSATION.length));
  return ids.map(load).filter(Boolean).sort((a, b) => b.saved - a.saved);
}

export function titleOf({ turns }) {
  const text = turns[0]?.question.trim().replace(/\s+/g, " ") ?? "";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "Empty conversation";
}

// ---- export

function contentOf(version) {
  return version.parts.every((part) => part.type === "text") ? version.parts.map((part) => part.text).join("") : version.parts;
}

// Messages as `trm build-data chat` reads them, with the answers of one model.
export function asJson({ system, turns }, model) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answers } of turns) {
    const version = answers[model]?.versions[answers[model].shown];
    if (!version || version.finish === "error") continue;
    messages.push({ role: "user", content: question }, { role: "assistant", content: contentOf(version) });
  }
  return `${JSON.stringify({ messages })}\n`;
}

export function asMarkdown(conversation) {
  const lines = [`# ${titleOf(conversation)}`];
  if (conversation.system) lines.push(`> ${conversation.system.replace(/\n/g, "\n> ")}`);
  for (const { question, answers } of conversation.turns) {
    lines.push("## Question", question);
    for (const [model, { shown, versions }] of Object.entries(answers)) {
      const version = versions[shown];
      if (version) lines.push(`### ${model}, step ${version.step}`, textOf(version));
    }
  }
  return `${lines.join("\n\n")}\n`;
}

export function textOf({ parts }) {
  const texts = { python: (text) => `\`${text}\``, python_output: (text) => ` = ${text} ` };
  return parts.map(({ type, text }) => texts[type]?.(text) ?? text).join("");
}
