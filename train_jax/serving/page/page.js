// The page of `trm serve`: a conversation with one or several language models, and puzzles solved step by step.
// Everything comes from this server. The conversation is kept in the browser's local storage.

const KEPT = "trm-serve";
const STEP_SECONDS = 0.25; // of an ACT step on the screen, at least
const SAVE_SECONDS = 0.5;

const $ = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function say(text) {
  $("status").textContent = text;
}

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// ---- the server

async function call(path, body, signal) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
    const request = body ? { method: "POST", body: JSON.stringify(body), headers, signal } : { headers, signal };
    const response = await fetch(path, request);
    if (response.ok) return response;
    if (response.status === 401) await askToken();
    else throw new Error(await messageOf(response));
  }
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

let asking = null;

function askToken() {
  asking ??= new Promise((resolve) => {
    $("ask-token").addEventListener(
      "close",
      () => {
        sessionStorage.setItem("token", $("token").value);
        asking = null;
        resolve();
      },
      { once: true },
    );
    $("ask-token").showModal();
  });
  return asking;
}

// Yields the objects of a stream of server-sent events.
async function* events(path, body, signal) {
  const response = await call(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server closed the connection");
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data: "))) {
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// ---- what is kept

const kept = {
  // Each turn has a question and, by model, the shown checkpoint and the answers of checkpoints.
  turns: [],
  models: null,
  settings: { temperature: 0.6, top_p: 1, max_tokens: null, seed: null, shade: false, theme: "light dark", view: null },
};
let saving = null;

function restoreKept() {
  try {
    const { turns, models, settings } = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    Object.assign(kept.settings, settings);
    kept.turns = turns ?? [];
    kept.models = models ?? null;
  } catch {
    localStorage.removeItem(KEPT);
  }
  for (const answer of kept.turns.flatMap((turn) => Object.values(turn.answers))) {
    for (const version of Object.values(answer.versions)) version.finish ??= "stopped";
  }
}

function save() {
  clearTimeout(saving);
  saving = null;
  try {
    localStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    showProblem("The conversation is too long to be kept by the browser.");
  }
}

function saveSoon() {
  saving ??= setTimeout(save, 1000 * SAVE_SECONDS);
}

// ---- chat

let models = [];
const running = new Map(); // AbortControllers of answers that are streamed

function chosenModels() {
  return models.filter((model) => kept.models.includes(model.id));
}

function messagesBefore(number, model) {
  const messages = [];
  for (const turn of kept.turns.slice(0, number)) {
    const answer = turn.answers[model.id];
    const version = answer?.versions[answer.step];
    if (!version) continue;
    const content = version.parts.length ? version.parts : [{ type: "text", text: "" }];
    messages.push({ role: "user", content: turn.question }, { role: "assistant", content });
  }
  return [...messages, { role: "user", content: kept.turns[number].question }];
}

function sampling() {
  const { temperature, top_p, max_tokens, seed } = kept.settings;
  return { temperature, top_p, ...(max_tokens && { max_tokens }), ...(seed !== null && { seed }) };
}

async function answerTurn(number, model, step) {
  const turn = kept.turns[number];
  const version = { parts: [], tokens: [], finish: null, error: null };
  const answer = (turn.answers[model.id] ??= { step, versions: {} });
  answer.step = step;
  answer.versions[step] = version;
  const abort = new AbortController();
  running.set(version, abort);
  showRunning();
  const card = () => document.querySelector(`[data-answer="${number}-${CSS.escape(model.id)}"]`);
  const began = performance.now();
  const name = step === model.step ? model.id : `${model.id}@${step}`;
  const body = { model: name, messages: messagesBefore(number, model), stream: true, logprobs: true, parts: true };
  try {
    fillCard(card(), number, model);
    for await (const { choices } of events("/v1/chat/completions", { ...body, ...sampling() }, abort.signal)) {
      for (const { delta, logprobs, finish_reason: finish } of choices) {
        for (const part of delta.parts ?? []) addPart(version.parts, part);
        for (const { bytes, logprob } of logprobs?.content ?? []) version.tokens.push([bytes, logprob]);
        version.finish = finish;
      }
      version.seconds = (performance.now() - began) / 1000;
      fillCard(card(), number, model);
      saveSoon();
    }
  } catch (error) {
    if (!abort.signal.aborted) version.error = error.message;
  } finally {
    version.finish ??= version.error ? "error" : "stopped";
    running.delete(version);
    fillCard(card(), number, model);
    showRunning();
    save();
  }
}

function addPart(parts, part) {
  const last = parts.at(-1);
  if (last?.type === "text" && part.type === "text") last.text += part.text;
  else parts.push({ ...part });
}

function ask(question) {
  kept.turns.push({ question, answers: {} });
  const number = kept.turns.length - 1;
  for (const model of chosenModels()) kept.turns[number].answers[model.id] = { step: stepOf(model), versions: {} };
  $("log").append(turnElement(number));
  for (const model of chosenModels()) answerTurn(number, model, stepOf(model));
  scrollTo(0, document.body.scrollHeight);
  save();
}

// The checkpoint that the conversation shows last.
function stepOf(model) {
  const last = kept.turns.findLast((turn) => turn.answers[model.id]);
  const step = last?.answers[model.id].step;
  return model.steps.includes(step) ? step : model.step;
}

function stopAll() {
  for (const abort of running.values()) abort.abort();
}

function showRunning() {
  $("stop").hidden = running.size === 0;
  $("send").hidden = running.size > 0;
  say(running.size ? "Answering" : "The answer is complete");
}

function showTurns() {
  $("log").replaceChildren(...kept.turns.map((_, number) => turnElement(number)));
}

function turnElement(number) {
  const turn = kept.turns[number];
  const cards = models.filter((model) => turn.answers[model.id]).map((model) => cardElement(number, model));
  const answers = element("div", { class: "answers" }, ...cards);
  return element("section", { class: "turn", "aria-label": `Question ${number + 1}` }, questionElement(number), answers);
}

function questionElement(number) {
  const row = element("div", { class: "question" });
  const show = () => {
    const edit = element("button", { type: "button", "aria-label": "Edit this question", onclick: change }, "Edit");
    row.replaceChildren(edit, element("p", {}, kept.turns[number].question));
  };
  const change = () => {
    const text = element("textarea", { "aria-label": "Question", rows: 2 });
    text.value = kept.turns[number].question;
    const submit = (event) => {
      event.preventDefault();
      if (!text.value.trim()) return;
      stopAll();
      kept.turns.length = number;
      showTurns();
      ask(text.value.trim());
      $("message").focus();
    };
    const cancel = () => {
      show();
      row.firstElementChild.focus();
    };
    const buttons = [
      element("button", { type: "button", onclick: cancel }, "Cancel"),
      element("button", { type: "submit" }, "Send again"),
    ];
    row.replaceChildren(element("form", { onsubmit: submit }, text, ...buttons));
    text.addEventListener("keydown", (event) => submitOnEnter(event, text.form));
    text.focus();
  };
  show();
  return row;
}

function cardElement(number, model) {
  const header = element("header", {}, element("h3", {}, model.id));
  if (model.steps.length > 1) header.append(...sliderOf(number, model));
  const text = element("div", { class: "text", tabindex: 0, role: "group", "aria-label": `Answer of ${model.id}` });
  const readout = element("output", { class: "readout", "aria-live": "polite" });
  const footer = element("footer", {}, readout, element("span", { class: "speed" }));
  const card = element("article", { class: "answer", "data-answer": `${number}-${model.id}` }, header, text, footer);
  text.addEventListener("pointerover", (event) => readToken(text, event.target.closest(".token"), readout));
  text.addEventListener("pointerleave", () => readToken(text, null, readout));
  text.addEventListener("blur", () => readToken(text, null, readout));
  text.addEventListener("keydown", (event) => moveToken(event, text, readout));
  fillCard(card, number, model);
  return card;
}

function sliderOf(number, model) {
  const answer = kept.turns[number].answers[model.id];
  const shown = element("output", {}, `step ${answer.step}`);
  const attributes = { type: "range", min: 0, max: model.steps.length - 1, "aria-label": `Checkpoint of ${model.id}` };
  const slider = element("input", attributes);
  slider.value = model.steps.indexOf(answer.step);
  const describe = () => {
    shown.textContent = `step ${model.steps[slider.value]}`;
    slider.setAttribute("aria-valuetext", shown.textContent);
  };
  slider.addEventListener("input", describe);
  slider.addEventListener("change", () => {
    const step = model.steps[slider.value];
    running.get(answer.versions[answer.step])?.abort();
    answer.step = step;
    if (answer.versions[step]) fillCard(slider.closest(".answer"), number, model);
    else answerTurn(number, model, step);
    save();
  });
  describe();
  return [element("label", {}, slider, shown)];
}

function fillCard(card, number, model) {
  const answer = kept.turns[number]?.answers[model.id];
  const version = answer?.versions[answer.step];
  if (!card || !version) return;
  const atEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
  const text = card.querySelector(".text");
  text.replaceChildren(...contents(version));
  if (version.error) text.append(element("p", { class: "error", role: "alert" }, version.error));
  card.setAttribute("aria-busy", running.has(version));
  card.querySelector(".speed").textContent = describeAnswer(version);
  if (running.has(version) && atEnd) scrollTo(0, document.body.scrollHeight);
}

function describeAnswer({ tokens, seconds, finish }) {
  const words = { length: "cut at the limit", stopped: "stopped" }[finish];
  const rate = seconds && tokens.length ? `${Math.round(tokens.length / seconds)} tokens/s` : "";
  return [tokens.length ? `${tokens.length} tokens` : "", rate, words].filter(Boolean).join(", ");
}

// Text as a span for each token, and a card for each call of a tool with its output.
function contents({ parts, tokens }) {
  const made = [];
  const spans = tokenSpans(tokens);
  for (let number = 0; number < parts.length; number++) {
    const { type, text } = parts[number];
    if (type === "text") {
      let rest = text;
      while (spans.length && rest.startsWith(spans[0].textContent)) {
        rest = rest.slice(spans[0].textContent.length);
        made.push(spans.shift());
        if (!rest) break;
      }
      if (rest) made.push(rest);
    } else {
      const isCall = type === "python";
      const output = isCall && parts[number + 1]?.type === "python_output" ? parts[++number].text : isCall ? null : text;
      made.push(toolCard(isCall ? text : null, output));
    }
  }
  return made;
}

function toolCard(expression, output) {
  const card = element("figure", { class: "tool" }, element("figcaption", {}, /^\s*sudoku\(/.test(expression ?? "") ? "Sudoku model" : "Calculator"));
  if (expression !== null) card.append(element("code", {}, expression));
  if (output !== null) card.append(" = ", element("strong", {}, output));
  return card;
}

// A token that ends within a character joins the one that completes it.
function tokenSpans(tokens) {
  const spans = [];
  let decoder = new TextDecoder();
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

function openChat() {
  kept.models = kept.models?.filter((id) => models.some((model) => model.id === id)) ?? [];
  if (!kept.models.length) kept.models = [models[0].id];
  $("models").hidden = models.length < 2;
  for (const model of models) {
    const box = element("input", { type: "checkbox" });
    box.checked = kept.models.includes(model.id);
    box.addEventListener("change", () => {
      kept.models = kept.models.filter((id) => id !== model.id).concat(box.checked ? [model.id] : []);
      if (!kept.models.length) {
        kept.models = [model.id];
        box.checked = true;
      }
      save();
    });
    $("models").append(element("label", {}, box, model.id));
  }
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    $(name).value = kept.settings[name] ?? "";
    $(name).addEventListener("change", () => {
      if (!$(name).reportValidity()) return;
      kept.settings[name] = $(name).value === "" ? null : Number($(name).value);
      save();
    });
  }
  const shade = () => $("log").classList.toggle("shaded", $("shade").checked);
  $("shade").checked = kept.settings.shade;
  $("shade").addEventListener("change", () => {
    kept.settings.shade = $("shade").checked;
    shade();
    save();
  });
  shade();
  $("clear").addEventListener("click", () => {
    stopAll();
    kept.turns = [];
    showTurns();
    save();
    $("message").focus();
  });
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
  showTurns();
}

// ---- puzzles

let players = [];
let solving = null; // AbortController
let steps = []; // what the server sent, by ACT step; the first is the input
let playing = null;

const player = () => players.find((each) => each.id === $("player").value);
const isSudoku = () => player().box !== null;
const BRUSHES = { "#": "wall", ".": "open", S: "start", G: "goal" };

function cells() {
  return [...$("editor").children];
}

function characterOf(cell) {
  return isSudoku() ? cell.value || "." : cell.dataset.character;
}

function puzzleText() {
  const all = cells().map(characterOf);
  const { rows, cols } = player();
  return Array.from({ length: rows }, (_, row) => all.slice(row * cols, (row + 1) * cols).join("")).join("\n");
}

function setCell(cell, character) {
  if (isSudoku()) {
    cell.value = /[1-9]/.test(character) ? character : "";
    return;
  }
  const known = character in BRUSHES ? character : ".";
  cell.dataset.character = known;
  cell.textContent = "SG".includes(known) ? known : "";
  cell.className = `${cell.dataset.edges} ${{ "#": "wall", S: "end", G: "end" }[known] ?? ""}`;
  cell.setAttribute("aria-label", `${cell.dataset.place}, ${BRUSHES[known]}`);
}

// The cells of a text; null if their number is another one.
function charactersOf(text) {
  const { rows, cols } = player();
  if (isSudoku()) {
    const found = text.replace(/[^0-9.]/g, "");
    return found.length === rows * cols ? [...found] : null;
  }
  const lines = text.replace(/\r/g, "").replace(/^\n+|\n+$/g, "").split("\n");
  const fits = lines.length === rows && lines.every((line) => line.length <= cols);
  return fits ? lines.flatMap((line) => [...line.padEnd(cols, ".")]) : null;
}

function fillEditor(text) {
  const characters = charactersOf(text);
  if (characters) cells().forEach((cell, number) => setCell(cell, characters[number]));
  return characters !== null;
}

function edited() {
  $("puzzle-text").value = puzzleText();
}

function openEditor() {
  const { rows, cols, box, kind, act_steps: limit, trajectories } = player();
  $("editor").style.gridTemplateColumns = `repeat(${cols}, 1fr)`;
  $("editor").style.gridTemplateRows = `repeat(${rows}, 1fr)`;
  $("editor").setAttribute("aria-label", kind);
  $("act_steps").value = limit;
  $("several-label").textContent = `${trajectories} trajectories side by side`;
  $("hint").textContent = isSudoku()
    ? `${kind}: type the digits, or paste a whole puzzle. Arrow keys move.`
    : `${kind}: draw with the pointer, or type # . S G. Arrow keys move.`;
  const made = Array.from({ length: rows * cols }, (_, number) => {
    const [row, col] = [Math.floor(number / cols), number % cols];
    const edges = ["cell"];
    if (col === cols - 1) edges.push("edge-right");
    else if (box && (col + 1) % box[1] === 0) edges.push("right");
    if (row === rows - 1) edges.push("edge-bottom");
    else if (box && (row + 1) % box[0] === 0) edges.push("bottom");
    const place = `row ${row + 1}, column ${col + 1}`;
    const attributes = { class: edges.join(" "), "aria-label": place, tabindex: number ? -1 : 0 };
    if (box) return element("input", { ...attributes, inputmode: "numeric", maxlength: 1, autocomplete: "off" });
    const cell = element("button", { ...attributes, type: "button" });
    Object.assign(cell.dataset, { edges: edges.join(" "), place });
    return cell;
  });
  $("editor").replaceChildren(...made);
  $("brushes").hidden = isSudoku();
  made.forEach((cell) => setCell(cell, "."));
  edited();
  showSteps([]);
}

function focusCell(cell) {
  cells().forEach((each) => (each.tabIndex = each === cell ? 0 : -1));
  cell.focus();
  if (isSudoku()) cell.select();
}

function typeInCell(event) {
  const all = cells();
  const number = all.indexOf(event.target);
  const { rows, cols } = player();
  if (number < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const [row, col] = [Math.floor(number / cols), number % cols];
  const moved = {
    ArrowLeft: [row, col - 1], ArrowRight: [row, col + 1], ArrowUp: [row - 1, col], ArrowDown: [row + 1, col],
  }[event.key];
  if (moved) {
    event.preventDefault();
    const [r, c] = [(moved[0] + rows) % rows, (moved[1] + cols) % cols];
    focusCell(all[r * cols + c]);
    return;
  }
  const character = { Backspace: ".", Delete: ".", 0: "." }[event.key] ?? event.key.toUpperCase();
  const allowed = isSudoku() ? /^[1-9.]$/.test(character) && (character === "." || character <= rows) : character in BRUSHES;
  if (character.length > 1 || (event.key === " " && !isSudoku())) return; // such as Tab; a blank presses the button
  event.preventDefault();
  if (!allowed) return;
  setCell(event.target, character);
  edited();
}

function brush() {
  return document.querySelector("#brushes input:checked").value;
}

function draw(event) {
  if (isSudoku() || !(event.buttons & 1)) return;
  const cell = document.elementFromPoint(event.clientX, event.clientY)?.closest?.("#editor .cell");
  if (cell) drawCell(cell);
}

function drawCell(cell) {
  if ("SG".includes(brush())) {
    for (const other of cells()) if (other.dataset.character === brush()) setCell(other, ".");
  }
  setCell(cell, brush());
  edited();
}

function openPuzzles() {
  $("player").append(...players.map(({ id }) => element("option", { value: id }, id)));
  $("player-row").hidden = players.length < 2;
  for (const [character, name] of Object.entries(BRUSHES)) {
    const radio = element("input", { type: "radio", name: "brush", value: character });
    radio.checked = character === "#";
    $("brushes").append(element("label", {}, radio, name));
  }
  $("player").addEventListener("change", () => {
    solving?.abort();
    openEditor();
  });
  $("editor").addEventListener("keydown", typeInCell);
  $("editor").addEventListener("input", (event) => { // a phone's keyboard has no keys to read
    const typed = event.target.value;
    setCell(event.target, typed <= player().rows ? typed : ".");
    edited();
  });
  $("editor").addEventListener("focusin", (event) => isSudoku() && event.target.select());
  $("editor").addEventListener("pointerdown", draw);
  $("editor").addEventListener("pointermove", draw);
  $("editor").addEventListener("click", (event) => {
    if (!isSudoku() && event.detail === 0 && event.target.matches(".cell")) drawCell(event.target); // by the keyboard
  });
  $("editor").addEventListener("paste", (event) => {
    if (!fillEditor(event.clipboardData.getData("text"))) return;
    event.preventDefault();
    edited();
  });
  $("puzzle-text").addEventListener("input", () => fillEditor($("puzzle-text").value));
  $("empty").addEventListener("click", openEditor);
  let index = 0;
  $("example").addEventListener("click", async () => {
    try {
      const body = { model: player().id, index: index++ };
      const response = await call("/v1/puzzles/examples", body);
      fillEditor((await response.json()).puzzle);
      edited();
      showProblem("");
    } catch (error) {
      index = 0;
      showProblem(error.message);
    }
  });
  $("solver").addEventListener("submit", (event) => {
    event.preventDefault();
    solve();
  });
  $("stop-solving").addEventListener("click", () => solving?.abort());
  $("step").addEventListener("input", () => {
    pause();
    showStep(Number($("step").value));
  });
  $("play").addEventListener("click", () => {
    if (playing) pause();
    else play(Number($("step").value) === steps.length - 1 ? 0 : Number($("step").value));
  });
  openEditor();
}

async function solve() {
  const body = {
    model: player().id,
    puzzle: $("text-form").open ? $("puzzle-text").value : puzzleText(),
    trajectories: $("several").checked ? player().trajectories : 1,
    noise: Number($("noise").value),
    seed: Number($("puzzle-seed").value),
    act_steps: Number($("act_steps").value),
  };
  showProblem("");
  showSteps([]);
  const abort = (solving = new AbortController());
  showSolving();
  try {
    for await (const event of events("/v1/puzzles/solve", body, abort.signal)) {
      if (event.input) showSteps([{ input: event.input, trajectories: [] }]);
      else if (event.verdicts) steps.verdicts = event.verdicts;
      else addStep(event);
    }
    say(steps.verdicts.map((text, row) => `Trajectory ${row + 1}: ${text}`).join(". "));
  } catch (error) {
    if (!abort.signal.aborted) showProblem(error.message);
  } finally {
    if (solving === abort) solving = null;
    showSolving();
    if (steps.length) showStep(Number($("step").value));
  }
}

function showSolving() {
  $("solve").hidden = solving !== null;
  $("stop-solving").hidden = solving === null;
}

function showSteps(all) {
  pause();
  steps = all;
  $("result").hidden = !steps.length;
  $("boards").replaceChildren();
  $("step").max = 0;
  if (steps.length) showStep(0);
}

function addStep(step) {
  steps.push(step);
  $("step").max = steps.length - 1;
  if (steps.length === 2) {
    $("boards").replaceChildren(...step.trajectories.map((_, row) => trajectoryElement(row)));
    $("result").scrollIntoView({ block: "nearest" });
    play(0);
  }
  showHalting();
}

function play(first) {
  pause();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) first = steps.length - 1;
  showStep(first);
  playing = setInterval(() => {
    const next = Number($("step").value) + 1;
    if (next < steps.length) showStep(next);
    else if (!solving) pause();
  }, 1000 * STEP_SECONDS);
  $("play").textContent = "Pause";
}

function pause() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Play";
}

function trajectoryElement(row) {
  const halts = element("div", { class: "halts", role: "img" });
  const board = element("div", { class: "board-place" });
  return element("figure", { "data-row": row }, board, halts, element("figcaption"));
}

function showStep(number) {
  const step = steps[number];
  $("step").value = number;
  $("step-shown").textContent = `${number} of ${steps.length - 1}`;
  $("step").setAttribute("aria-valuetext", `ACT step ${$("step-shown").textContent}`);
  for (const figure of $("boards").children) {
    const row = Number(figure.dataset.row);
    const { board, caption, solved } = step.trajectories[row] ?? { board: step.input, caption: "input" };
    figure.querySelector(".board-place").innerHTML = board; // drawn by the server
    const title = steps[1]?.trajectories.length > 1 ? `Trajectory ${row + 1}${row ? ", with noise" : ""}` : "";
    const isLast = number === steps.length - 1 && steps.verdicts;
    const lines = [title, isLast ? `${caption}; ${steps.verdicts[row]}` : caption];
    figure.classList.toggle("solved", solved === true);
    figure.querySelector("figcaption").replaceChildren(element("strong", {}, lines[0]), lines[1]);
  }
  showHalting();
}

function showHalting() {
  const here = Number($("step").value);
  for (const figure of $("boards").children) {
    const values = steps.slice(1).map((step) => step.trajectories[figure.dataset.row].halting_probability);
    const bars = values.map((value, number) => {
      const bar = element("i", { class: number + 1 === here ? "here" : null });
      bar.style.setProperty("--p", value);
      return bar;
    });
    const halts = figure.querySelector(".halts");
    halts.replaceChildren(...bars);
    halts.setAttribute("aria-label", `Halting probability by ACT step: ${values.map((p) => p.toFixed(2)).join(", ")}`);
  }
}

// ---- the frame

function showView(name) {
  for (const each of ["chat", "puzzles"]) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  kept.settings.view = name;
  save();
}

function openFrame() {
  const setTheme = () => (document.documentElement.style.colorScheme = kept.settings.theme);
  $("theme").value = kept.settings.theme;
  $("theme").addEventListener("change", () => {
    kept.settings.theme = $("theme").value;
    setTheme();
    save();
  });
  setTheme();
  for (const name of ["chat", "puzzles"]) $(`tab-${name}`).addEventListener("click", () => showView(name));
  $("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = kept.settings.view === "chat" ? "puzzles" : "chat";
    showView(other);
    $(`tab-${other}`).focus();
  });
  addEventListener("pagehide", save);
}

async function open() {
  restoreKept();
  openFrame();
  try {
    const lists = await Promise.all(["/v1/models", "/v1/puzzles"].map(async (path) => (await call(path)).json()));
    [models, players] = lists.map((list) => list.data);
  } catch (error) {
    $("loading").textContent = `The server does not answer: ${error.message}`;
    return;
  }
  $("loading").hidden = true;
  if (models.length) openChat();
  if (players.length) openPuzzles();
  const views = [models.length && "chat", players.length && "puzzles"].filter(Boolean);
  $("tabs").hidden = views.length < 2;
  showView(views.includes(kept.settings.view) ? kept.settings.view : views[0]);
}

open();
