"use strict";
// Draws the graphs: rows of the part that is in sight only, so that a graph of many thousand nodes scrolls like one of ten.
(() => {
  const board = document.getElementById("board");
  if (!board) return;
  const ROW = 22, SPARE = 16;
  const byId = (id) => document.getElementById(id);
  const read = (id) => JSON.parse(byId(id).textContent);
  const { strings, lines, views } = read("views");
  const graphs = new Map();
  const state = { view: 0, rows: [[], []], at: [new Map(), new Map()], near: [new Set(), new Set()], drawn: [[0, 0], [0, 0]], picked: null, marked: null, chosen: null, by: "line" };
  const lists = [byId("list0"), byId("list1")];

  /** An element whose children are nodes or text; text never becomes markup. */
  function make(tag, options, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(options ?? {})) {
      if (key === "on") element.addEventListener("click", value);
      else if (key === "class") element.className = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((c) => c !== null && c !== undefined));
    return element;
  }
  function drawn(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  function bytes(count) {
    if (count < 1000) return `${count} B`;
    for (const unit of ["kB", "MB", "GB", "TB"]) {
      count /= 1000;
      if (count < 999.95 || unit === "TB") return `${count.toFixed(1)} ${unit}`;
    }
  }
  const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

  function graphOf(number) {
    if (!graphs.has(number)) {
      const g = read(`graph-${number}`);
      const size = g.names.length;
      g.operator = g.operators.map((i) => strings[i]);
      g.look = g.looks.map((i) => strings[i]);
      g.short = g.operator.map((o) => (o.includes(":") ? o.split(":")[1] : o.includes(".") ? o.split(".")[1] : o));
      g.kind = g.operator.map((o, i) => (o === "weight" || o === "constant" ? "weight" : o === "placeholder" || o === "output" ? "edge" : g.look[i] || o === "graph" ? "" : "size"));
      g.kind.forEach((kind, i) => { if (kind === "size" && g.operator[i].endsWith("copy_.default")) g.kind[i] = ""; });
      g.users = Array.from({ length: size }, () => []);
      g.inputs.forEach((inputs, i) => inputs.forEach((j) => g.users[j].push(i)));
      g.text = g.names.map((name, i) => `${name}\n${g.operator[i]}\n${g.places[i] < 0 ? "" : lines[g.places[i]][4]}`.toLowerCase());
      graphs.set(number, g);
    }
    return graphs.get(number);
  }
  const view = () => views[state.view];
  const columns = () => view().columns;
  const graph = (c) => graphOf(columns()[c].graph);

  // What a row says.
  const label = (c, i) => columns()[c].given[i] ?? graph(c).names[i];
  const operator = (c, i) => (graph(c).operator[i] === "placeholder" ? "in" : graph(c).short[i]);
  function where(place) {
    if (place < 0) return "";
    const [file, number, , , module] = lines[place];
    return file ? `${file.split("/").pop()}:${number}` : module;
  }

  function filter() {
    const query = byId("query").value.trim().toLowerCase();
    const weights = byId("weights").checked, sizes = byId("sizes").checked, only = byId("only").checked && state.marked;
    let found = 0, all = 0, hidden = 0;
    columns().forEach((column, c) => {
      const g = graph(c), rows = [];
      for (let i = 0; i < g.names.length; i++) {
        const matches = !query || g.text[i].includes(query) || label(c, i).toLowerCase().includes(query);
        const shown = query || (g.kind[i] === "weight" ? weights : g.kind[i] === "size" ? sizes : true);
        if (matches && shown && (!only || state.marked.has(g.places[i]))) rows.push(i);
        else if (matches && !shown) hidden++;
      }
      all += g.names.length;
      found += rows.length;
      state.rows[c] = rows;
      state.at[c] = new Map(rows.map((node, row) => [node, row]));
      lists[c].firstElementChild.style.height = `${rows.length * ROW}px`;
    });
    byId("found").textContent = query || only ? `${found.toLocaleString("en")} of ${counted(all, "node")}` : `${counted(all, "node")}${hidden ? `, ${hidden.toLocaleString("en")} hidden` : ""}`;
    redraw();
  }

  function redraw() {
    columns().forEach((_, c) => { rows(c); ruler(c); });
    wires();
  }

  /** The rows in sight and some around them. `moved`: nothing has changed but where the list stands, and those that are there may do. */
  function rows(c, moved) {
    const list = lists[c], g = graph(c), seen = state.rows[c], made = [];
    const first = Math.floor(list.scrollTop / ROW), last = Math.ceil((list.scrollTop + list.clientHeight) / ROW);
    if (moved && state.drawn[c][0] <= Math.max(0, first) && Math.min(seen.length, last) <= state.drawn[c][1]) return;
    const [from, to] = (state.drawn[c] = [Math.max(0, first - SPARE), Math.min(seen.length, last + SPARE)]);
    for (let r = from; r < to; r++) {
      const i = seen[r], place = g.places[i], picked = state.picked && state.picked.column === c && state.picked.node === i;
      const kinds = ["row"];
      if (g.kind[i] === "edge" || g.kind[i] === "weight") kinds.push(g.kind[i]);
      if (columns().length > 1 && c === 0 && kept(c, i)) kinds.push("kept");
      if (picked) kinds.push("pick");
      else if (state.marked && state.marked.has(place)) kinds.push("mark");
      if (!picked && state.near[c].has(i)) kinds.push("near");
      const row = make("div", { class: kinds.join(" "), role: "option", id: `row${c}-${i}`, "aria-selected": String(Boolean(picked)), "aria-setsize": seen.length, "aria-posinset": r + 1 },
        make("span", { class: "index" }, String(i)),
        make("span", { class: "operator", title: g.operator[i] }, operator(c, i)),
        make("span", { class: "name", title: label(c, i) }, label(c, i)),
        make("span", { class: "looks", title: g.look[i] }, g.look[i]),
        make("span", { class: "where", title: place < 0 ? "" : lines[place][3] }, where(place)));
      row.style.top = `${r * ROW}px`;
      made.push(row);
    }
    list.firstElementChild.replaceChildren(...made);
    const active = state.picked && state.picked.column === c ? `row${c}-${state.picked.node}` : null;
    if (active && byId(active)) list.setAttribute("aria-activedescendant", active);
    else list.removeAttribute("aria-activedescendant");
  }
  const kept = (c, i) => (columns()[c].gives[i] ?? []).some((what) => what.startsWith("saved ")) || (columns()[c].kept ??= new Set(view().links.map((l) => l[0]))).has(i);

  /** Where in the whole graph the highlighted nodes are. */
  function ruler(c) {
    const canvas = lists[c].nextElementSibling, height = lists[c].clientHeight, ratio = window.devicePixelRatio || 1;
    canvas.width = 7 * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d"), colours = getComputedStyle(document.documentElement), g = graph(c);
    const total = Math.max(state.rows[c].length * ROW, height), tall = Math.max(2, (ROW * height) / total) * ratio;
    const tick = (r, name) => { context.fillStyle = colours.getPropertyValue(name); context.fillRect(0, ((r * ROW) / total) * canvas.height, canvas.width, tall); };
    if (state.marked) state.rows[c].forEach((i, r) => { if (state.marked.has(g.places[i])) tick(r, "--mark-edge"); });
    state.near[c].forEach((i) => { if (state.at[c].has(i)) tick(state.at[c].get(i), "--link"); });
  }

  /** Saved tensors, from the node that makes them to where the backward takes them; those of the chosen nodes to whoever reads them, too. */
  function wires() {
    const svg = byId("wires");
    if (columns().length < 2) return;
    const width = svg.clientWidth, height = lists[0].clientHeight, top = lists[0].getBoundingClientRect().top - svg.getBoundingClientRect().top;
    const y = (c, i) => (state.at[c].has(i) ? top + state.at[c].get(i) * ROW + ROW / 2 - lists[c].scrollTop : null);
    const inside = (v) => v > top - ROW && v < top + height + ROW;
    const first = graph(0), second = graph(1), paths = [], hot = [];
    const join = (a, b, into, kind) => {
      const from = y(0, a), to = y(1, b);
      if (from === null || to === null || !(inside(from) || inside(to))) return;
      into.push(drawn("path", { d: `M0 ${from}C${width / 2} ${from} ${width / 2} ${to} ${width} ${to}`, class: kind }));
    };
    const { picked, marked } = state;
    for (const [a, b] of view().links) {
      const chosen = picked && ((picked.column === 0 && picked.node === a) || (picked.column === 1 && (picked.node === b || second.inputs[picked.node].includes(b))));
      join(a, b, chosen ? hot : paths, chosen ? "hot" : "");
      for (const user of second.users[b]) {
        const reads = picked && ((picked.column === 0 && picked.node === a) || (picked.column === 1 && picked.node === user));
        if (reads || (marked && marked.has(first.places[a]) && marked.has(second.places[user]))) join(a, user, hot, "hot");
      }
    }
    const clip = drawn("clipPath", { id: "within" });
    clip.append(drawn("rect", { x: 0, y: top, width, height }));
    const group = drawn("g", { "clip-path": "url(#within)" });
    group.append(...paths, ...hot);
    svg.replaceChildren(clip, group);
  }

  function reveal(c, i, always) {
    const g = graph(c);
    if (!state.at[c].has(i)) {
      byId("query").value = "";
      byId("only").checked = false;
      if (g.kind[i] === "weight") byId("weights").checked = true;
      if (g.kind[i] === "size") byId("sizes").checked = true;
      filter();
    }
    const list = lists[c], y = state.at[c].get(i) * ROW;
    if (always || y < list.scrollTop || y + ROW > list.scrollTop + list.clientHeight) list.scrollTop = y - list.clientHeight / 3;
  }

  function pick(c, i) {
    state.picked = { column: c, node: i };
    state.near = [new Set(), new Set()];
    const g = graph(c);
    [...g.inputs[i], ...g.users[i]].forEach((j) => state.near[c].add(j));
    partners(c, i).forEach((j) => state.near[1 - c].add(j));
    reveal(c, i, false);
    describe();
    redraw();
    current();
  }
  const partners = (c, i) => view().links.filter((l) => l[c] === i).map((l) => l[1 - c]);

  function describe() {
    const panel = byId("detail");
    if (!state.picked) {
      panel.replaceChildren(make("p", { class: "quiet" }, "No node chosen. The up and down keys move within a column, left and right between the two. / searches. Escape clears the search, and then everything else."));
      return;
    }
    const { column: c, node: i } = state.picked, g = graph(c), column = columns()[c], place = g.places[i];
    const nodes = (title, of, list) => {
      if (!list.length) return null;
      const shown = list.slice(0, 60).map((j) => make("li", {}, make("button", { type: "button", on: () => { pick(of, j); lists[of].focus({ preventScroll: true }); } }, `${j} ${label(of, j)}`), ` ${operator(of, j)}`));
      if (list.length > 60) shown.push(make("li", {}, `and ${list.length - 60} more`));
      return make("div", {}, make("h4", {}, `${title} (${list.length})`), make("ul", {}, ...shown));
    };
    const about = [make("h4", { class: "title" }, `${label(c, i)} · ${g.operator[i]}`)];
    const held = g.views[i] ? "in the memory of its input" : bytes(g.bytes[i]);
    about.push(make("p", {}, g.look[i] ? `${g.look[i]}, strides ${strings[g.strides[i]]}, ${held}` : "not a tensor", `; node ${i} of the ${column.role}, ${bytes(g.live[i])} live`));
    if (g.calls[i]) about.push(make("p", { class: "call" }, `${g.short[i]}(${g.calls[i]})`));
    if (column.gives[i]) about.push(make("p", {}, `Comes out as ${column.gives[i].join(", ")}.`));
    if (place >= 0) {
      const [file, number, name, text, module] = lines[place];
      if (file) about.push(make("p", { class: "line" }, make("button", { type: "button", on: () => choose("line", lineKey(place)) }, `${file}:${number}`), ` ${name ? `${name}: ` : ""}${text}`));
      if (module) about.push(make("p", {}, "Submodule ", make("button", { type: "button", on: () => choose("module", module) }, module)));
    } else if (g.kind[i] === "") about.push(make("p", { class: "quiet" }, "Not from a line of the model."));
    const other = columns().length > 1 ? nodes(c === 0 ? "Saved for the backward" : "Saved by the forward", 1 - c, partners(c, i)) : null;
    panel.replaceChildren(make("div", {}, ...about), make("div", {}, nodes("Reads", c, g.inputs[i]), c === 1 ? other : null), make("div", {}, nodes("Read by", c, g.users[i]), c === 0 ? other : null));
  }

  // Where the nodes come from.
  const lineKey = (place) => (lines[place][0] ? `${lines[place][0]}\n${lines[place][1]}` : "");
  const within = (module, name) => module === name || module.startsWith(`${name}.`);
  const inOrder = (a, b) => a.localeCompare(b, "en", { numeric: true });

  function sources() {
    const counts = new Map();
    columns().forEach((_, c) => graph(c).places.forEach((place, i) => {
      if (place < 0 || graph(c).kind[i] === "edge") return;
      const [file, , , , module] = lines[place];
      const names = state.by === "line" ? (file ? [lineKey(place)] : []) : module.split(".").map((_, k, parts) => parts.slice(0, k + 1).join(".")).filter(Boolean);
      for (const name of names) {
        if (!counts.has(name)) counts.set(name, { place, counts: [0, 0] });
        counts.get(name).counts[c]++;
      }
    }));
    const items = [];
    let file = "";
    for (const name of [...counts.keys()].sort(inOrder)) {
      const { place, counts: n } = counts.get(name), [path, number, , text] = lines[place];
      if (state.by === "line" && path !== file) items.push(make("li", { class: "file" }, (file = path)));
      const depth = name.split(".").length - 1;
      const words = state.by === "line" ? text : `${"\u00a0\u00a0".repeat(depth)}${name.split(".").pop()}`;
      const count = columns().length > 1 ? `${n[0]} · ${n[1]}` : String(n[0]);
      const said = columns().length > 1 ? `${counted(n[0], "node")} forward, ${n[1]} backward` : counted(n[0], "node");
      const button = make("button", { type: "button", title: `${state.by === "line" ? `${path}:${number} ${text}` : name}\n${said}`, "data-name": name, on: () => choose(state.by, name) },
        make("span", { class: "number" }, state.by === "line" ? String(number) : ""), make("span", { class: "text" }, words), make("span", { class: "count" }, count));
      items.push(make("li", {}, button));
    }
    if (!items.length) items.push(make("li", { class: "file" }, state.by === "line" ? "No lines from your files: see the submodules." : "No submodules."));
    byId("places").replaceChildren(...items);
    byId("by-line").setAttribute("aria-pressed", String(state.by === "line"));
    byId("by-module").setAttribute("aria-pressed", String(state.by === "module"));
    current();
  }

  /** Shows in the list of sources what is highlighted, and where the chosen node comes from. */
  function current() {
    const place = state.picked ? graph(state.picked.column).places[state.picked.node] : -1;
    const own = place < 0 ? "" : state.by === "line" ? lineKey(place) : lines[place][4];
    for (const button of byId("places").querySelectorAll("button")) {
      const on = state.chosen && state.chosen.by === state.by && state.chosen.name === button.dataset.name, at = own !== "" && button.dataset.name === own;
      button.classList.toggle("on", Boolean(on));
      button.classList.toggle("at", at);
      button.setAttribute("aria-pressed", String(Boolean(on)));
      if (at || on) button.scrollIntoView({ block: "nearest" });
    }
  }

  function choose(by, name) {
    const again = state.chosen && state.chosen.by === by && state.chosen.name === name;
    state.chosen = again ? null : { by, name };
    state.marked = again ? null : new Set(lines.keys());
    if (!again) for (const place of lines.keys()) if (by === "line" ? lineKey(place) !== name : !within(lines[place][4], name)) state.marked.delete(place);
    if (state.by !== by) { state.by = by; sources(); }
    filter();
    if (!again) columns().forEach((_, c) => {
      const g = graph(c), first = state.rows[c].find((i) => g.kind[i] === "" && state.marked.has(g.places[i]));
      if (first !== undefined) reveal(c, first, true);
    });
    redraw();
    current();
  }

  function clear() {
    byId("query").value = "";
    byId("only").checked = false;
    Object.assign(state, { picked: null, marked: null, chosen: null, near: [new Set(), new Set()] });
    describe();
    filter();
    current();
  }

  function show(number) {
    state.view = number;
    byId("view").value = String(number);
    board.classList.toggle("single", columns().length < 2);
    columns().forEach((column, c) => {
      const g = graph(c), title = byId(`title${c}`), most = g.live.reduce((a, b) => Math.max(a, b), 0);
      title.className = column.role === "backward" ? "second" : "first";
      title.replaceChildren(column.role, make("span", {}, `${column.library}, ${counted(g.names.length, "node")}, peak ${bytes(most)}`));
      lists[c].setAttribute("aria-label", `Nodes of the ${column.role}, in the order in which they run`);
      lists[c].scrollTop = 0;
    });
    board.classList.toggle("plain", columns().every((_, c) => graph(c).places.every((place) => place < 0)));
    state.by = columns().some((_, c) => graph(c).places.some((place) => place >= 0 && lines[place][0])) ? "line" : "module";
    clear();
    sources();
  }

  // Charts: what is live at the node under the pointer, and the way to it.
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector("svg"), probe = chart.querySelector(".probe");
    const [number, left, right, width] = ["view", "left", "right", "width"].map((key) => Number(chart.dataset[key]));
    const found = (event) => {
      const box = svg.getBoundingClientRect(), cols = views[number].columns.map((c) => graphOf(c.graph));
      const total = cols.reduce((n, g) => n + g.names.length, 0), x = ((event.clientX - box.left) / box.width) * width;
      let i = Math.floor(((x - left) / (width - left - right)) * total);
      if (i < 0 || i >= total) return null;
      const c = i < cols[0].names.length ? 0 : 1;
      if (c) i -= cols[0].names.length;
      return { c, i, x, g: cols[c] };
    };
    svg.addEventListener("pointermove", (event) => {
      const at = found(event);
      if (!at) return probe.replaceChildren();
      const label = `${at.i} ${views[number].columns[at.c].given[at.i] ?? at.g.names[at.i]} (${at.g.short[at.i]}): ${bytes(at.g.live[at.i])}`;
      probe.replaceChildren(drawn("line", { x1: at.x, x2: at.x, y1: 18, y2: 216 }), drawn("text", { x: at.x, y: 13, "text-anchor": at.x > width / 2 ? "end" : "start" }, label));
    });
    svg.addEventListener("pointerleave", () => probe.replaceChildren());
    svg.addEventListener("click", (event) => {
      const at = found(event);
      if (!at) return;
      if (state.view !== number) show(number);
      byId("graph").scrollIntoView();
      pick(at.c, at.i);
    });
  }

  lists.forEach((list, c) => {
    let waiting = false;
    list.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; rows(c, true); wires(); });
    }, { passive: true });
    list.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) pick(c, Number(row.id.slice(5)));
    });
    list.addEventListener("keydown", (event) => {
      const seen = state.rows[c], mine = state.picked && state.picked.column === c ? state.at[c].get(state.picked.node) : undefined;
      const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
      const here = mine ?? Math.floor(list.scrollTop / ROW) - 1;
      const to = { ArrowDown: here + 1, ArrowUp: here - 1, PageDown: here + page, PageUp: here - page, Home: 0, End: seen.length - 1 }[event.key];
      if (to !== undefined && seen.length) pick(c, seen[Math.min(seen.length - 1, Math.max(0, to))]);
      else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && columns().length > 1) {
        const other = event.key === "ArrowRight" ? 1 : 0;
        const partner = mine === undefined || other === c ? undefined : partners(c, state.picked.node)[0];
        lists[other].focus({ preventScroll: true });
        if (partner !== undefined) pick(other, partner);
      } else return;
      event.preventDefault();
    });
  });
  byId("view").addEventListener("change", (event) => show(Number(event.target.value)));
  for (const id of ["weights", "sizes", "only"]) byId(id).addEventListener("change", filter);
  byId("query").addEventListener("input", () => { lists.forEach((list) => { list.scrollTop = 0; }); filter(); });
  byId("clear").addEventListener("click", clear);
  byId("by-line").addEventListener("click", () => { state.by = "line"; sources(); });
  byId("by-module").addEventListener("click", () => { state.by = "module"; sources(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && byId("query").value) {
      byId("query").value = "";
      filter();
      if (state.picked) reveal(state.picked.column, state.picked.node, false);
    } else if (event.key === "Escape") clear();
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      byId("query").focus();
    }
  });
  new ResizeObserver(redraw).observe(board);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  show(0);
})();
