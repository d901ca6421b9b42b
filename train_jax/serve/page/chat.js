// Conversations with one or several language models.

import {
  $, button, call, copyText, downloadText, element, events, offerUndo, Refused, say, showProblem,
} from "/base.js";
import * as conversations from "/conversations.js";
import { settings, saveSettings } from "/conversations.js";
import { markdown } from "/markdown.js";

const SAVE_SECONDS = 0.5;
const ABANDONED_SECONDS = 10; // after which another tab may continue an answer that was being streamed
const TRIES = [
  ["Ask who it is", "Who are you?"],
  ["Calculate", "What is 12 times 34?"],
  ["Spell a word", "How do you spell the word 'package'?"],
];

let models = [];
let talk = null; // the conversation that is shown
let saving = null;
let current = null; // the number of the turn whose controls the Tab key reaches
const running = new Map(); // AbortControllers of answers that are streamed

const tab = (() => {
  const id = sessionStorage.getItem("tab") ?? conversations.fresh().id;
  sessionStorage.setItem("tab", id);
  return id;
})();

// ---- what is kept

export function save() {
  clearTimeout(saving);
  saving = null;
  if (!talk || (!talk.turns.length && !conversations.load(talk.id))) return; // an empty one is not listed
  if (!conversations.store(talk)) showProblem("The browser keeps no more conversations: delete some.");
}

function saveSoon() {
  saving ??= setTimeout(save, 1000 * SAVE_SECONDS);
}

function show(conversation) {
  stopAll();
  save();
  talk = conversation;
  sessionStorage.setItem("conversation", talk.id);
  $("system").value = talk.system ?? "";
  $("system-set").hidden = !talk.system;
  current = null;
  showTurns();
  scrollToEnd();
}

function showChanged(event) {
  if (!talk || !conversations.isOf(event.key, talk.id) || running.size) return;
  talk = conversations.load(talk.id) ?? talk;
  showTurns();
}

// ---- history

function shownVersion(turn, model) {
  const answer = turn.answers[model.id];
  return answer?.versions[answer.shown];
}

// A turn that failed is no part of what the model reads.
function messagesBefore(number, model) {
  const messages = talk.system ? [{ role: "system", content: talk.system }] : [];
  for (const turn of talk.turns.slice(0, number)) {
    const version = shownVersion(turn, model);
    if (!version || version.finish === "error") continue;
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content: contentOf(version.parts) });
  }
  return [...messages, { role: "user", content: talk.turns[number].question }];
}

function contentOf(parts) {
  return parts.length ? parts : [{ type: "text", text: "" }];
}

function sampling() {
  const { temperature, top_p, max_tokens, seed } = settings;
  return { temperature, top_p, ...(max_tokens && { max_tokens }), ...(seed !== null && { seed }) };
}

// ---- answers

function answerTurn(number, model, step) {
  const answer = (talk.turns[number].answers[model.id] ??= { shown: 0, versions: [] });
  const version = { step, parts: [], tokens: [], finish: null, error: null };
  answer.shown = answer.versions.push(version) - 1;
  return stream(number, model, version, messagesBefore(number, model));
}

// Continues an answer that a reload cut: its text is the beginning of the new one.
function resume(number, model, version) {
  if (version.parts.at(-1)?.type === "python") version.parts.pop(); // the calculator has not answered
  const before = messagesBefore(number, model);
  const begun = version.parts.length ? [{ role: "assistant", content: version.parts }] : [];
  return stream(number, model, version, [...before, ...begun]);
}

async function stream(number, model, version, messages) {
  const conversation = talk;
  Object.assign(version, { finish: null, error: null, tab });
  const abort = new AbortController();
  running.set(version, abort);
  showRunning();
  const isShown = () => talk === conversation && talk.turns[number] && shownVersion(talk.turns[number], model) === version;
  const fill = () => isShown() && fillCard(number, model);
  const began = performance.now() - 1000 * (version.seconds ?? 0);
  const name = version.step === model.step ? model.id : `${model.id}@${version.step}`;
  const body = { model: name, messages, stream: true, logprobs: true, parts: true, ...sampling() };
  try {
    fill();
    for await (const { choices } of events("/v1/chat/completions", body, abort.signal)) {
      for (const { delta, logprobs, finish_reason: finish } of choices) {
        for (const part of delta.parts ?? []) addPart(version.parts, part);
        for (const { bytes, logprob } of logprobs?.content ?? []) version.tokens.push([bytes, logprob]);
        version.finish = finish;
      }
      version.seconds = (performance.now() - began) / 1000;
      fill();
      saveSoon();
    }
  } catch (error) {
    if (!abort.signal.aborted) version.error = messageOf(error);
  } finally {
    const isLeaving = abort.signal.aborted && abort.signal.reason === "leaving";
    if (!isLeaving) version.finish ??= version.error ? "error" : "stopped";
    running.delete(version);
    fill();
    showRunning();
    if (isShown()) say(version.error ?? `${model.id} answered: ${conversations.textOf(version)}`);
    if (talk === conversation) save();
    else if (!conversation.isDeleted) conversations.store(conversation);
  }
}

function messageOf(error) {
  if (error instanceof Refused && error.code === "context_length_exceeded") {
    return `This conversation is longer than the model reads (${error.message}). The question is kept out of it: shorten it, or ask it in a new conversation.`;
  }
  return `${error.message[0].toUpperCase()}${error.message.slice(1)}.`.replace(/\.\.$/, ".");
}

function addPart(parts, part) {
  const last = parts.at(-1);
  if (last?.type === "text" && part.type === "text") last.text += part.text;
  else parts.push({ ...part });
}

function ask(question) {
  const number = talk.turns.push({ question, answers: {} }) - 1;
  current = number;
  const chosen = models.filter((model) => settings.models.includes(model.id));
  // The cards of all models are there before the first answer begins.
  for (const model of chosen) talk.turns[number].answers[model.id] = { shown: 0, versions: [] };
  showTurns();
  for (const model of chosen) answerTurn(number, model, stepOf(model));
  scrollToEnd();
  save();
}

// The checkpoint that the conversation shows last.
function stepOf(model) {
  const last = talk.turns.findLast((turn) => shownVersion(turn, model));
  const step = last && shownVersion(last, model).step;
  return model.steps.includes(step) ? step : model.step;
}

function stopAll(reason) {
  for (const abort of running.values()) abort.abort(reason);
}

function showRunning() {
  $("stop").hidden = running.size === 0;
  $("send").hidden = running.size > 0;
  if (running.size) say("Answering");
}

// ---- turns

function scrollToEnd() {
  scrollTo(0, document.body.scrollHeight);
}

function showTurns() {
  $("log").replaceChildren(...talk.turns.map((_, number) => turnElement(number)));
  $("start").hidden = talk.turns.length > 0;
  $("export").hidden = talk.turns.length === 0;
  showCurrent();
}

// The Tab key reaches the controls of one turn: the last one, or that to which the arrow keys moved.
function showCurrent() {
  const last = talk.turns.length - 1;
  const here = Math.min(current ?? last, last);
  [...$("log").children].forEach((turn, number) => {
    for (const each of turn.querySelectorAll("button, input, textarea, .text, .wide")) each.tabIndex = number === here ? 0 : -1;
  });
}

function moveTurn(event) {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const turn = event.target.closest(".turn");
  if (!step || !turn || event.target.matches("input, textarea")) return;
  const number = [...$("log").children].indexOf(turn) + step;
  if (number < 0 || number >= talk.turns.length) return;
  event.preventDefault();
  current = number;
  showCurrent();
  ($("log").children[number].querySelector(".text") ?? $("log").children[number].querySelector("button")).focus();
}

function turnElement(number) {
  const turn = talk.turns[number];
  const cards = models.filter((model) => turn.answers[model.id]).map((model) => cardElement(number, model));
  const answers = element("div", { class: "answers" }, ...cards);
  return element("section", { class: "turn", "aria-label": `Question ${number + 1}` }, questionElement(number), answers);
}

function questionElement(number) {
  const row = element("div", { class: "question" });
  const display = () => {
    const edit = button("Edit", change, { "aria-label": `Edit question ${number + 1}` });
    row.replaceChildren(edit, element("p", {}, talk.turns[number].question));
    showCurrent();
  };
  const change = () => {
    const text = element("textarea", { "aria-label": "Question", rows: 2 });
    text.value = talk.turns[number].question;
    const submit = (event) => {
      event.preventDefault();
      if (!text.value.trim()) return;
      stopAll();
      const before = structuredClone(talk.turns);
      const conversation = talk;
      talk.turns.length = number;
      if (before.length > number + 1) {
        offerUndo(`Edited question ${number + 1}; what followed it is left out`, () => {
          conversation.turns = before;
          show(conversation);
          save();
        });
      }
      ask(text.value.trim());
      $("message").focus();
    };
    const cancel = () => {
      display();
      row.firstElementChild.focus();
    };
    const buttons = [button("Cancel", cancel), element("button", { type: "submit" }, "Send again")];
    row.replaceChildren(element("form", { onsubmit: submit }, text, ...buttons));
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else submitOnEnter(event, text.form);
    });
    text.focus();
  };
  const edit = button("Edit", change, { "aria-label": `Edit question ${number + 1}` });
  row.append(edit, element("p", {}, talk.turns[number].question));
  return row;
}

// ---- the card of an answer

function cardElement(number, model) {
  const header = element("header", {}, element("h3", {}, model.id));
  if (model.steps.length > 1) header.append(...sliderOf(number, model));
  const text = element("div", { class: "text", tabindex: 0, role: "group", "aria-label": `Answer of ${model.id}` });
  const readout = element("output", { class: "readout", "aria-live": "polite" });
  const footer = element("footer", {}, readout, element("span", { class: "speed" }), element("div", { class: "tools" }));
  const card = element("article", { class: "answer", "data-answer": `${number}-${model.id}` }, header, text, footer);
  text.addEventListener("pointerover", (event) => readToken(text, event.target.closest(".token"), readout));
  text.addEventListener("pointerleave", () => readToken(text, null, readout));
  text.addEventListener("blur", () => readToken(text, null, readout));
  text.addEventListener("keydown", (event) => moveToken(event, text, readout));
  fill(card, number, model);
  return card;
}

function sliderOf(number, model) {
  const version = shownVersion(talk.turns[number], model);
  const shown = element("output", {}, "");
  const attributes = { type: "range", min: 0, max: model.steps.length - 1, "aria-label": `Checkpoint of ${model.id}` };
  const slider = element("input", attributes);
  slider.value = model.steps.indexOf(version?.step ?? model.step);
  const describe = () => {
    shown.textContent = `step ${model.steps[slider.value]}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
  };
  slider.addEventListener("input", describe);
  slider.addEventListener("change", () => {
    const answer = talk.turns[number].answers[model.id];
    const step = model.steps[slider.value];
    running.get(answer.versions[answer.shown])?.abort();
    const known = answer.versions.findLastIndex((each) => each.step === step);
    if (known < 0) answerTurn(number, model, step);
    else answer.shown = known;
    fillCard(number, model);
    save();
  });
  describe();
  return [element("label", {}, slider, shown)];
}

function cardOf(number, model) {
  return document.querySelector(`[data-answer="${number}-${CSS.escape(model.id)}"]`);
}

function fillCard(number, model) {
  const card = cardOf(number, model);
  if (card) fill(card, number, model);
}

function fill(card, number, model) {
  const version = shownVersion(talk.turns[number], model);
  if (!version) return;
  const atEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
  const isRunning = running.has(version);
  const text = card.querySelector(".text");
  text.replaceChildren(...(settings.tokens ? tokenContents(version) : markdownContents(version)));
  if (version.error) text.append(element("p", { class: "error" }, version.error));
  card.setAttribute("aria-busy", isRunning);
  card.querySelector(".speed").textContent = describeAnswer(version);
  const state = `${isRunning} ${version.finish} ${talk.turns[number].answers[model.id].versions.length} ${talk.turns[number].answers[model.id].shown}`;
  const tools = card.querySelector(".tools");
  if (tools.dataset.state !== state) {
    const focused = tools.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    tools.dataset.state = state;
    tools.replaceChildren(...(isRunning ? [] : toolButtons(number, model, version)));
    if (focused) (tools.querySelector(`[aria-label="${CSS.escape(focused)}"]:not(:disabled)`) ?? text).focus();
  }
  if (card.isConnected) showCurrent();
  if (isRunning && atEnd) scrollToEnd();
}

function toolButtons(number, model, version) {
  const answer = talk.turns[number].answers[model.id];
  const made = [];
  if (answer.versions.length > 1) {
    const turn = (by) => () => {
      answer.shown += by;
      showSlider(number, model);
      fillCard(number, model);
      save();
    };
    made.push(
      button("‹", turn(-1), { "aria-label": "Previous version", disabled: answer.shown === 0 }),
      element("span", { class: "count" }, `${answer.shown + 1} of ${answer.versions.length}`),
      button("›", turn(1), { "aria-label": "Next version", disabled: answer.shown === answer.versions.length - 1 }),
    );
  }
  const again = () => {
    if (version.finish === "error" && !version.parts.length) {
      answer.versions.splice(answer.shown, 1); // a retry takes the place of what failed
    }
    current = number;
    answerTurn(number, model, version.step);
  };
  const failed = version.finish === "error";
  if (failed && version.parts.length) made.push(button("Continue", () => resume(number, model, version), { "aria-label": "Continue this answer" }));
  made.push(button(failed ? "Retry" : "Regenerate", again, { "aria-label": failed ? "Ask this again" : "Regenerate this answer" }));
  if (failed && talk.turns.length > 1) {
    made.push(button("Ask in a new conversation", () => {
      const { question } = talk.turns[number];
      newConversation();
      ask(question);
    }, {}));
  }
  if (version.parts.length) made.push(button("Copy", () => copyText(conversations.textOf(version)), { "aria-label": "Copy this answer" }));
  return made;
}

function showSlider(number, model) {
  const slider = cardOf(number, model)?.querySelector("input[type=range]");
  if (!slider) return;
  slider.value = model.steps.indexOf(shownVersion(talk.turns[number], model).step);
  slider.dispatchEvent(new Event("input"));
}

function describeAnswer({ tokens, seconds, finish }) {
  const words = { length: "cut at the limit", stopped: "stopped" }[finish];
  const rate = seconds && tokens.length ? `${Math.round(tokens.length / seconds)} tokens/s` : "";
  return [tokens.length ? `${tokens.length} tokens` : "", rate, words].filter(Boolean).join(", ");
}

function markdownContents({ parts }) {
  return withTools(parts, (text) => [element("div", { class: "markdown" }, markdown(text))]);
}

// Text as a span for each token.
function tokenContents({ parts, tokens }) {
  const spans = tokenSpans(tokens);
  return withTools(parts, (text) => {
    const made = [];
    let rest = text;
    while (spans.length && rest.startsWith(spans[0].textContent)) {
      rest = rest.slice(spans[0].textContent.length);
      made.push(spans.shift());
      if (!rest) break;
    }
    if (rest) made.push(rest);
    return made;
  });
}

// A card for each call of a tool with its output, between what `show` makes of the texts.
function withTools(parts, show) {
  const made = [];
  for (let number = 0; number < parts.length; number++) {
    const { type, text } = parts[number];
    if (type === "text") made.push(...show(text));
    else {
      const isCall = type === "python";
      const output = isCall && parts[number + 1]?.type === "python_output" ? parts[++number].text : isCall ? null : text;
      made.push(toolCard(isCall ? text : null, output));
    }
  }
  return made;
}

function toolCard(expression, output) {
  const name = /^\s*sudoku\(/.test(expression ?? "") ? "Sudoku model" : "Calculator";
  const card = element("figure", { class: "tool" }, element("figcaption", {}, name));
  if (expression !== null) card.append(element("code", {}, expression));
  if (output !== null) card.append(" = ", element("strong", {}, output));
  return card;
}

// A token that ends within a character joins the one that completes it.
function tokenSpans(tokens) {
  const spans = [];
  const decoder = new TextDecoder();
  let logProb = 0;
  for (const [bytes, value] of tokens) {
    logProb += value;
    const text = decoder.decode(new Uint8Array(bytes), { stream: true });
    if (!text) continue;
    const span = element("span", { class: "token", title: percent(logProb) }, text);
    span.style.setProperty("--p", Math.exp(logProb).toFixed(3));
    spans.push(span);
    logProb = 0;
  }
  return spans;
}

function percent(logProb) {
  const share = 100 * Math.exp(logProb);
  return `${share < 1 ? share.toPrecision(2) : share.toFixed(1)} %`;
}

function readToken(text, token, readout) {
  text.querySelector(".here")?.classList.remove("here");
  token?.classList.add("here");
  readout.textContent = token ? `“${token.textContent.replace(/\n/g, "⏎")}” ${token.title}` : "";
}

function moveToken(event, text, readout) {
  const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const tokens = [...text.querySelectorAll(".token")];
  if (!direction || !tokens.length) return;
  event.preventDefault();
  const here = tokens.findIndex((token) => token.classList.contains("here"));
  const next = here < 0 ? (direction > 0 ? 0 : tokens.length - 1) : here + direction;
  readToken(text, tokens[Math.min(Math.max(next, 0), tokens.length - 1)], readout);
}

function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}

// ---- the list

function newConversation() {
  const before = talk;
  show(conversations.fresh());
  if (before.turns.length) offerUndo("A new conversation", () => show(before));
  $("message").focus();
}

function showList() {
  const rows = conversations.all().map((each) => {
    const isShown = each.id === talk.id;
    const title = conversations.titleOf(each);
    const open = () => {
      $("list").close();
      if (!isShown) show(conversations.load(each.id) ?? each);
      $("message").focus();
    };
    const discard = () => {
      conversations.remove(each.id);
      if (isShown) {
        talk.isDeleted = true;
        stopAll();
        talk = conversations.fresh();
        show(talk);
      }
      showList();
      $("list-close").focus();
      offerUndo(`Deleted “${title}”`, () => {
        conversations.store(each);
        if (isShown) show(each);
        if ($("list").open) showList();
      });
    };
    const attributes = { class: "open", ...(isShown && { "aria-current": "true" }) };
    const when = element("time", {}, new Date(each.saved).toLocaleString());
    return element("li", {}, element("button", { type: "button", onclick: open, ...attributes }, title, when),
      button("Delete", discard, { "aria-label": `Delete “${title}”` }));
  });
  const none = element("li", {}, element("p", { class: "note" }, "No conversation is kept in this browser."));
  $("list-rows").replaceChildren(...(rows.length ? rows : [none]));
}

function exportAs(kind) {
  const name = conversations.titleOf(talk).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
  if (kind === "md") downloadText(`${name}.md`, conversations.asMarkdown(talk), "text/markdown");
  else downloadText(`${name}.jsonl`, conversations.asJson(talk, settings.models[0]), "application/json");
}

// ---- the start

function showStart() {
  const tries = TRIES.map(([title, question]) => {
    const press = () => {
      ask(question);
      $("message").focus();
    };
    return element("button", { type: "button", onclick: press }, element("strong", {}, title), element("span", {}, question));
  });
  $("tries").replaceChildren(...tries);
  const cards = models.map((model) => {
    const rows = Object.entries(model.card ?? {}).map(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
    return element("section", { class: "card" }, element("h3", {}, model.id), element("dl", {}, ...rows.flat()));
  });
  $("cards").replaceChildren(...cards);
}

function resumeAll() {
  const now = Date.now();
  talk.turns.forEach((turn, number) => {
    for (const model of models) {
      const answer = turn.answers[model.id];
      if (answer && !answer.versions.length) delete turn.answers[model.id];
      for (const version of answer?.versions ?? []) {
        if (version.finish) continue;
        const isOurs = version.tab === tab || now - talk.saved > 1000 * ABANDONED_SECONDS;
        if (isOurs && version === shownVersion(turn, model)) resume(number, model, version);
        else if (isOurs) version.finish = "stopped";
      }
    }
  });
}

export function openChat(served) {
  models = served;
  settings.models = settings.models?.filter((id) => models.some((model) => model.id === id)) ?? [];
  if (!settings.models.length) settings.models = [models[0].id];
  $("models").hidden = models.length < 2;
  for (const model of models) {
    const box = element("input", { type: "checkbox" });
    box.checked = settings.models.includes(model.id);
    box.addEventListener("change", () => {
      settings.models = settings.models.filter((id) => id !== model.id).concat(box.checked ? [model.id] : []);
      if (!settings.models.length) {
        settings.models = [model.id];
        box.checked = true;
      }
      saveSettings();
    });
    $("models").append(element("label", {}, box, model.id));
  }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    $(name).value = settings[name] ?? "";
    $(name).addEventListener("change", () => {
      if (!$(name).reportValidity()) return;
      settings[name] = $(name).value === "" ? null : Number($(name).value);
      saveSettings();
    });
  }
  $("tokens").checked = settings.tokens;
  $("tokens").addEventListener("change", () => {
    settings.tokens = $("tokens").checked;
    saveSettings();
    showTurns();
  });
  $("system").addEventListener("change", () => {
    talk.system = $("system").value.trim();
    $("system-set").hidden = !talk.system;
    save();
  });
  $("new").addEventListener("click", newConversation);
  $("open-list").addEventListener("click", () => {
    save();
    showList();
    $("list").showModal();
  });
  $("list-close").addEventListener("click", () => $("list").close());
  $("export-json").addEventListener("click", () => exportAs("json"));
  $("export-md").addEventListener("click", () => exportAs("md"));
  $("stop").addEventListener("click", () => {
    stopAll();
    $("message").focus();
  });
  $("message").addEventListener("keydown", (event) => submitOnEnter(event, $("composer")));
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = $("message").value.trim();
    if (!question || running.size) return;
    $("message").value = "";
    showProblem("");
    ask(question);
  });
  $("log").addEventListener("keydown", moveTurn);
  addEventListener("storage", showChanged);
  addEventListener("pagehide", () => {
    save();
    stopAll("leaving");
  });
  addEventListener("pageshow", (event) => event.persisted && resumeAll());
  showStart();
  talk = conversations.load(sessionStorage.getItem("conversation")) ?? conversations.fresh();
  show(talk);
  resumeAll();
  showTurns();
}

export function enterChat() {
  scrollToEnd();
  $("message").focus({ preventScroll: true });
}
