// The page of `trm serve`: conversations with language models, and puzzles solved step by step. Everything comes from this
// server; conversations are kept in the browser's local storage.

import { $, button, call, copyText, element, events, say, showProblem } from "/base.js";
import { enterChat, openChat } from "/chat.js";
import { restoreSettings, saveSettings, settings } from "/conversations.js";

const STEP_SECONDS = 0.25; // of an ACT step on the screen, at least

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
    if (!(await fillExample({ index: index++ }))) index = 0;
  });
  $("hard").addEventListener("click", () => fillExample({ hard: true }));
  $("link").addEventListener("click", async () => {
    const address = new URL(location.href);
    address.hash = new URLSearchParams({ model: player().id, puzzle: puzzleText() });
    history.replaceState(null, "", address);
    await copyText(address.href);
  });
  addEventListener("hashchange", openLink);
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

// Returns whether there was such a puzzle.
async function fillExample(which) {
  try {
    const response = await call("/v1/puzzles/examples", { model: player().id, ...which });
    fillEditor((await response.json()).puzzle);
    edited();
    showProblem("");
    return true;
  } catch (error) {
    showProblem(error.message);
    return false;
  }
}

// Shows the puzzle that the address has after its #; returns whether it has one.
function openLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  const text = given.get("puzzle");
  if (text === null) return false;
  const model = players.find((each) => each.id === given.get("model"));
  if (model && model !== player()) {
    $("player").value = model.id;
    openEditor();
  }
  if (fillEditor(text)) edited();
  else showProblem("The link holds no puzzle of this model's size.");
  showView("puzzles");
  return true;
}

async function openFirst() {
  if (puzzleText().replace(/[.\n]/g, "") || !$("problem").hidden) return;
  try {
    const response = await call("/v1/puzzles/examples", { model: player().id, hard: true });
    if (!puzzleText().replace(/[.\n]/g, "")) fillEditor((await response.json()).puzzle);
    edited();
  } catch {
    // The data set is elsewhere: the editor stays empty.
  }
}

async function solve() {
  const body = {
    model: player().id,
    puzzle: $("text-form").open ? $("puzzle-text").value : puzzleText(),
    trajectories: $("several").checked ? player().trajectories : 1,
    views: $("views").checked ? player().trajectories : 1,
    noise: $("views").checked ? 0 : Number($("noise").value),
    seed: Number($("puzzle-seed").value),
    act_steps: Number($("act_steps").value),
    cycles: $("cycles").checked,
  };
  showProblem("");
  showSteps([]);
  const abort = (solving = new AbortController());
  showSolving();
  try {
    for await (const event of events("/v1/puzzles/solve", body, abort.signal)) {
      if (event.input) {
        showSteps([{ input: event.input, trajectories: [] }]);
        steps.views = body.views > 1;
      } else if (event.verdicts) steps.verdicts = event.verdicts;
      else addStep(event);
    }
    say(steps.verdicts.map((text, row) => `${titleOf(row, steps.views)}: ${text}`).join(". "));
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
  const within = step.trajectories[0].cycles ?? [];
  within.forEach((_, number) => {
    steps.push({ trajectories: step.trajectories.map(({ cycles }) => cycles[number]), isWithin: true });
  });
  steps.push(step);
  $("step").max = steps.length - 1;
  if (!$("boards").children.length) {
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

function titleOf(row, views) {
  if (views) return `View ${row + 1}${row ? "" : ", the puzzle itself"}`;
  return `Trajectory ${row + 1}${row ? ", with noise" : ""}`;
}

function showStep(number) {
  const step = steps[number];
  $("step").value = number;
  const count = (until) => steps.slice(1, until).filter((each) => !each.isWithin).length;
  const within = step.isWithin ? `, in step ${count(number) + 1}` : "";
  $("step-shown").textContent = `${count(number + 1)} of ${count()}${within}`;
  $("step").setAttribute("aria-valuetext", `ACT step ${$("step-shown").textContent}`);
  for (const figure of $("boards").children) {
    const row = Number(figure.dataset.row);
    const { board, caption, solved } = step.trajectories[row] ?? { board: step.input, caption: "input" };
    figure.querySelector(".board-place").innerHTML = board; // drawn by the server
    const title = steps[1]?.trajectories.length > 1 ? titleOf(row, steps.views) : "";
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
    const shown = steps[here];
    const whole = steps.slice(1).filter((step) => !step.isWithin);
    const values = whole.map((step) => step.trajectories[figure.dataset.row].halting_probability);
    const bars = values.map((value, number) => {
      const bar = element("i", { class: whole[number] === shown ? "here" : null });
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
  settings.view = name;
  saveSettings();
  if (name === "chat") enterChat();
}

function openFrame() {
  const setTheme = () => (document.documentElement.style.colorScheme = settings.theme);
  $("theme").value = settings.theme;
  $("theme").addEventListener("change", () => {
    settings.theme = $("theme").value;
    setTheme();
    saveSettings();
  });
  setTheme();
  for (const name of ["chat", "puzzles"]) $(`tab-${name}`).addEventListener("click", () => showView(name));
  $("tabs").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = settings.view === "chat" ? "puzzles" : "chat";
    showView(other);
    $(`tab-${other}`).focus();
  });
}

async function open() {
  restoreSettings();
  openFrame();
  let models;
  try {
    const lists = await Promise.all(["/v1/models", "/v1/puzzles"].map(async (path) => (await call(path)).json()));
    [models, players] = lists.map((list) => list.data);
  } catch (error) {
    $("loading").replaceChildren(`The server does not answer: ${error.message}. `, button("Try again", () => location.reload()));
    return;
  }
  $("loading").hidden = true;
  if (models.length) openChat(models);
  if (players.length) openPuzzles();
  const views = [models.length && "chat", players.length && "puzzles"].filter(Boolean);
  $("tabs").hidden = views.length < 2;
  showView(views.includes(settings.view) ? settings.view : views[0]);
  if (players.length && !openLink()) openFirst();
}

open();
