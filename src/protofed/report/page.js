// Draws the page's tables and figures from the JSON in #data, when they come near the reader's eyes.
(function () {
  "use strict";

  const data = JSON.parse(document.getElementById("data").textContent);
  const MOST_LINES = 10; // of a table, before a reader asks for all
  const MOST_DRAWN = 8; // rows of a figure
  const chosen = new Map(Object.entries(data.first)); // labels by chapter
  const drawn = new Map(); // what is on the page, by its element: a function that draws it again

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {}))
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  // Tables

  const parts = (cell) => (Array.isArray(cell) ? cell : [cell]);

  function valueOf(cell) {
    const [text, , , , value] = parts(cell);
    if (value === "inf") return Infinity;
    if (typeof value === "number") return value;
    if (text === "" || text === "–") return null;
    const read = Number(text.replace("−", "-").replaceAll(",", ""));
    return Number.isNaN(read) ? text.toLowerCase() : read;
  }

  // Unknown values stay at the end whichever way the column is sorted.
  function compare(a, b, sign) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a !== typeof b) return sign * (typeof a === "string" ? 1 : -1);
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  }

  function tableCell(cell, column) {
    const [text, spread, interval, best] = parts(cell);
    const value = valueOf(cell);
    const made = element("td", { class: best ? "best" : column[3] ? "text" : null });
    if (typeof value === "number") made.dataset.value = value;
    made.append(element("span", { class: "main" }, text));
    if (spread) made.append(element("span", { class: "spread" }, spread));
    if (interval) made.append(element("span", { class: "interval" }, interval));
    return made;
  }

  function tableRow([label, mark, ...cells], columns) {
    const head = element("th", { scope: "row" }, label);
    if (mark === "trivial") head.append(element("span", { class: "mark" }, "trivial"));
    return element("tr", { class: mark || null }, head, ...cells.map((cell, i) => tableCell(cell, columns[i])));
  }

  function headings(table, state, sort) {
    const one = (label, column, first, hint, isText) => {
      const button = element("button", { type: "button", onclick: () => sort(column, first) }, label);
      const way = state.column === column ? state.way : null;
      const about = { scope: "col", class: isText ? "text" : null, "data-column": column, "aria-sort": way };
      return element("th", { ...about, title: hint || null }, button);
    };
    const row = element("tr", null, one(table.corner, 0, "ascending"));
    table.columns.forEach(([label, , hint, isText, isLower], i) =>
      row.append(one(label, i + 1, isText || isLower ? "ascending" : "descending", hint, isText)),
    );
    if (!table.columns.some((column) => column[1])) return [row];
    const groups = element("tr", { class: "groups" }, element("td"));
    for (let i = 0, n; i < table.columns.length; i += n) {
      n = 1;
      while (i + n < table.columns.length && table.columns[i + n][1] === table.columns[i][1]) n++;
      groups.append(element("th", { scope: "colgroup", colspan: n }, table.columns[i][1]));
    }
    return [groups, row];
  }

  function showTable(place) {
    const name = place.dataset.table;
    const table = data.tables[name];
    const at = table.columns.findIndex((column) => !column[3]); // the first of numbers, by which lines come
    const first = table.columns[at];
    const state = { all: false, column: null, way: null, lines: table.lines };
    if (first && first[5]) Object.assign(state, { column: at + 1, way: first[4] ? "ascending" : "descending" });
    function sort(column, first) {
      const turned = state.way === "ascending" ? "descending" : "ascending";
      state.way = state.column === column ? turned : first;
      state.column = column;
      const sign = state.way === "ascending" ? 1 : -1;
      const of = (line) => (column ? valueOf(line[column + 1]) : line[0].toLowerCase());
      state.lines = table.lines.toSorted((a, b) => compare(of(a), of(b), sign));
      const had = document.activeElement;
      draw();
      if (had && had.closest("th")) place.querySelector(`th[data-column="${column}"] button`).focus();
    }
    function draw() {
      const shown = state.all ? state.lines : state.lines.slice(0, MOST_LINES);
      const body = element("tbody", null, ...shown.map((line) => tableRow(line, table.columns)));
      const made = element("table", { class: "sortable", id: name });
      if (table.caption) made.append(element("caption", null, table.caption));
      made.append(element("thead", null, ...headings(table, state, sort)), body);
      if (table.footer) made.append(element("tfoot", null, ...table.footer.map((line) => tableRow(line, table.columns))));
      const label = table.caption || name;
      const box = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, made);
      const below = element("p", { class: "below" });
      if (table.lines.length > MOST_LINES) {
        const words = state.all ? `the first ${MOST_LINES}` : `all ${table.lines.length} rows`;
        below.append(element("button", { type: "button", onclick: () => ((state.all = !state.all), draw()) }, words));
      }
      below.append(csvLink(name, () => tableCsv(table)));
      place.replaceChildren(box, below);
    }
    drawn.set(place, (all) => ((state.all = all), draw()));
    draw();
  }

  // CSV

  // No text may be one that a spreadsheet runs.
  function field(value) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const safe = /^[=+@\t\r-]/.test(value) ? "'" + value : value;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  const csvOf = (rows) => rows.map((row) => row.map(field).join(",")).join("\n") + "\n";

  function tableCsv(table) {
    const wide = table.columns.map((_, i) =>
      table.lines.some((line) => parts(line[i + 2])[1] || parts(line[i + 2])[2]),
    );
    const names = table.columns.map(([label, group]) => (group ? `${group} ${label}` : label));
    const head = names.flatMap((name, i) => (wide[i] ? [name, `${name} ±`, `${name} 95 %`] : [name]));
    const cells = (cell, i) => {
      const [text, spread, interval] = parts(cell);
      const value = valueOf(cell);
      const first = typeof value === "number" && value !== Infinity ? value : text;
      return wide[i] ? [first, (spread || "").replace("±", ""), interval || ""] : [first];
    };
    return csvOf([[table.corner, ...head], ...table.lines.map(([label, , ...own]) => [label, ...own.flatMap(cells)])]);
  }

  function csvLink(name, text) {
    const link = element("a", { class: "csv", download: `${name}.csv`, href: "#" }, "data (CSV)");
    link.addEventListener("click", () => {
      const address = URL.createObjectURL(new Blob([text()], { type: "text/csv;charset=utf-8" }));
      link.href = address;
      setTimeout(() => URL.revokeObjectURL(address), 60000);
    });
    link.csv = text; // for whoever wants the text without a download
    return link;
  }

  // Figures

  function rowsOf(figure) {
    const columns = figure.columns.map((c) => (Array.isArray(c) ? c : c.at.map((place) => c.words[place])));
    return columns[0].map((_, i) => columns.map((column) => column[i]));
  }

  const ink = (label) => (data.always.includes(label) ? "currentColor" : (data.looks[label] || ["var(--other)"])[0]);
  const dash = (label) => (data.always.includes(label) ? "1.5 2.5" : (data.looks[label] || ["", ""])[1]);
  const decimals = (value) => (value === 0 ? "0" : d3.format(".4~g")(value));
  const short = (label, most) => (label.length > most ? label.slice(0, most - 1) + "…" : label);

  function common(width, height) {
    const style = { background: "none", color: "currentColor", fontFamily: "var(--sans)", fontSize: "11px" };
    return { width, height, style, className: "plot", marginLeft: 48, marginBottom: 36, insetTop: 4 };
  }

  // Everybody, or those that were chosen; what is always drawn has its place among the eight.
  function labelsOf(figure, chapter) {
    const all = [...new Set(figure.rows.map((row) => row[0]))];
    const always = all.filter((label) => data.always.includes(label));
    const wanted = all.filter((label) => (chosen.get(chapter) || []).includes(label));
    if (all.length <= MOST_DRAWN || !all.some((label) => data.looks[label])) return { all, shown: all };
    const picked = wanted.length ? wanted : all;
    return { all, shown: [...picked.slice(0, MOST_DRAWN - always.length), ...always] };
  }

  function xScale(values) {
    const known = values.filter((value) => value !== null);
    const [low, high] = d3.extent(known);
    const least = d3.min(known.filter((value) => value > 0));
    const single = [...new Set(known)].sort(d3.ascending);
    const ticks = single.length <= 9 ? { ticks: single, tickFormat: decimals } : { tickFormat: decimals };
    if (least === undefined || low < 0 || high / least < 20) return { ...ticks, type: "linear" };
    return low > 0 ? { ...ticks, type: "log" } : { ...ticks, type: "symlog", constant: least };
  }

  function lines(figure, shown, width) {
    const [x, y, fromZero] = figure.axes;
    const own = figure.rows.filter((row) => shown.includes(row[0]) && row[2] !== null);
    const levels = own.filter((row) => row[1] === null);
    const points = own.filter((row) => row[1] !== null);
    const z = (row) => row[0];
    const stroke = (row) => ink(row[0]);
    const spread = points.filter((row) => row[3]);
    const marks = shown.map((label) =>
      Plot.line(points.filter((row) => row[0] === label), {
        x: "1", y: "2", stroke: ink(label), strokeWidth: 1.7, strokeDasharray: dash(label) || null,
      }),
    );
    const title = (row) => `${row[0]}\n${x} ${decimals(row[1])}: ${decimals(row[2])}${row[3] ? ` ± ${decimals(row[3])}` : ""}`;
    return Plot.plot({
      ...common(width, 260),
      x: { ...xScale(points.map((row) => row[1])), label: x, labelArrow: "none" },
      y: { grid: true, label: y, labelArrow: "none", zero: fromZero, tickFormat: decimals, nice: true },
      marks: [
        Plot.areaY(spread, { x: "1", y1: (r) => r[2] - r[3], y2: (r) => r[2] + r[3], z, fill: stroke, fillOpacity: 0.13 }),
        Plot.ruleY(levels, { y: "2", stroke, strokeDasharray: "4 2" }),
        ...marks,
        Plot.dot(points, { x: "1", y: "2", fill: stroke, r: 2.4 }),
        Plot.tip(points, Plot.pointer({ x: "1", y: "2", title, fill: "var(--panel)", stroke: "var(--faint)" })),
      ],
    });
  }

  function dots(figure, shown, width) {
    const [x, , gains] = figure.axes;
    const rows = figure.rows.filter((row) => shown.includes(row[0]));
    const name = (row) => short(figure.header[4] === "users" ? `${row[0]} (${row[4].toLocaleString("en")})` : row[0], 30);
    const gain = (row) => (row[2] > 0 ? "var(--better)" : row[3] < 0 ? "var(--worse)" : "var(--soft)");
    const stroke = gains ? gain : (row) => ink(row[0]);
    return Plot.plot({
      ...common(width, 52 + 21 * rows.length),
      marginLeft: Math.min(190, width / 2.2),
      x: { label: x, labelArrow: "none", grid: true, tickFormat: decimals, ticks: 5 },
      y: { label: null, domain: rows.map(name), tickSize: 0 },
      marks: [
        gains ? Plot.ruleX([0], { stroke: "var(--faint)" }) : null,
        Plot.ruleY(rows.filter((row) => row[2] !== null), { x1: "2", x2: "3", y: name, stroke, strokeWidth: 1.8 }),
        Plot.dot(rows, { x: "1", y: name, fill: stroke, r: 3.4 }),
      ],
    });
  }

  function points(figure, shown, width) {
    const [x, y] = figure.axes;
    const is = (row) => shown.includes(row[0]);
    const mine = figure.rows.filter(is);
    const fill = (row) => (is(row) ? ink(row[0]) : "var(--faint)");
    const title = (row) => `${row[0]}\n${x} ${decimals(row[1])}\n${y} ${decimals(row[2])}`;
    const between = (row, i) => [row[i] - (row[i + 2] || 0), row[i] + (row[i + 2] || 0)];
    return Plot.plot({
      ...common(width, 260),
      inset: 8,
      x: { label: x, labelArrow: "none", tickFormat: decimals },
      y: { label: y, labelArrow: "none", grid: true, tickFormat: decimals },
      marks: [
        Plot.dot(figure.rows.filter((row) => !is(row)), { x: "1", y: "2", fill, r: 2.6 }),
        Plot.link(mine, { x1: (r) => between(r, 1)[0], x2: (r) => between(r, 1)[1], y1: "2", y2: "2", stroke: fill }),
        Plot.link(mine, { x1: "1", x2: "1", y1: (r) => between(r, 2)[0], y2: (r) => between(r, 2)[1], stroke: fill }),
        Plot.dot(mine, { x: "1", y: "2", fill, r: 4 }),
        Plot.tip(figure.rows, Plot.pointer({ x: "1", y: "2", title, fill: "var(--panel)", stroke: "var(--faint)" })),
      ],
    });
  }

  function users(figure, shown, width) {
    const [x, y] = figure.axes;
    const fill = (row) => (row[2] > 0.05 ? "var(--faint)" : row[0] > 0 ? "var(--better)" : "var(--worse)");
    return Plot.plot({
      ...common(width, 260),
      x: { label: x, labelArrow: "none", tickFormat: decimals },
      y: { label: y, labelArrow: "none", grid: true, zero: true },
      marks: [
        Plot.ruleX([0], { stroke: "var(--faint)" }),
        Plot.ruleY([-Math.log10(0.05)], { stroke: "currentColor", strokeDasharray: "4 2" }),
        Plot.dot(figure.rows, { x: "0", y: (row) => -Math.log10(row[1]), fill, r: 2 }),
      ],
    });
  }

  function map(figure, shown, width) {
    const [x, y] = figure.axes;
    const cells = (row) => row.slice(2).map((value, t) => [row[0], row[1], t, value]);
    const rows = figure.rows.filter((row) => row[0] === figure.label).flatMap(cells).filter((row) => row[3] !== null);
    const [low, high] = d3.extent(figure.rows.flatMap((row) => row.slice(2)));
    const size = Math.min(width, 420);
    const shade = (row) => d3.interpolateCividis(high > low ? (row[3] - low) / (high - low) : 0.5);
    const letters = (row) => ((row[3] - low) / (high - low || 1) > 0.5 ? "#16181d" : "#f4f4f0");
    return Plot.plot({
      ...common(size, size),
      padding: 0,
      x: { label: x, labelArrow: "none", type: "band" },
      y: { label: y, labelArrow: "none", type: "band" },
      marks: [
        Plot.cell(rows, { x: "2", y: "1", fill: shade }),
        Plot.cell(rows.filter((row) => row[1] === row[2]), { x: "2", y: "1", stroke: "currentColor", inset: 0.5 }),
        size / Math.sqrt(rows.length || 1) < 26
          ? null
          : Plot.text(rows, { x: "2", y: "1", text: (row) => row[3].toFixed(2).replace("0.", "."), fill: letters, fontSize: 10 }),
      ],
    });
  }

  const KINDS = { lines, dots, points, users, map };

  function key(shown) {
    const line = (label) =>
      `<svg class="swatch" viewBox="0 0 28 10" aria-hidden="true"><path d="M1 5h26" stroke="${ink(label)}" ` +
      `stroke-width="2" stroke-dasharray="${dash(label)}"/></svg>`;
    const item = (label) => {
      const made = element("li");
      made.innerHTML = line(label); // colours and dashes only, all of them ours
      made.append(label);
      return made;
    };
    return element("ul", { class: "legend" }, ...shown.map(item));
  }

  function showFigure(place) {
    const name = place.dataset.figure;
    const figure = data.figures[name];
    figure.rows = figure.rows || rowsOf(figure);
    const holder = place.closest("[data-chapter]");
    const chapter = holder && holder.dataset.chapter;
    function draw() {
      const { all, shown } = figure.kind === "users" ? { all: [], shown: [] } : labelsOf(figure, chapter);
      const below = element("p", { class: "below" });
      if (figure.kind === "map") {
        figure.label = figure.label || (chosen.get(chapter) || []).find((label) => all.includes(label)) || shown[0];
        const change = (event) => ((figure.label = event.target.value), draw());
        const option = (label) => element("option", { selected: label === figure.label ? "" : null }, label);
        below.append(element("select", { "aria-label": "row", onchange: change }, ...all.map(option)));
      } else if (all.length > shown.length) {
        const words = `${shown.length} of ${all.length} rows: choose`;
        below.append(element("button", { type: "button", onclick: () => choose(chapter, all) }, words));
      }
      below.append(csvLink(name, () => csvOf([figure.header, ...figure.rows])));
      const svg = KINDS[figure.kind](figure, shown, Math.max(240, Math.min(place.clientWidth || 480, 640)));
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", figure.caption);
      const withKey = (figure.kind === "lines" && shown.length > 1) || figure.kind === "points";
      const caption = element("figcaption", null, figure.caption);
      place.replaceChildren(caption, svg, ...(withKey ? [key(shown)] : []), below);
    }
    drawn.set(place, draw);
    draw();
  }

  // One dialog lets a reader choose the rows of all figures of a chapter.
  function choose(chapter, all) {
    const dialog = element("dialog", { "aria-label": "Rows of the figures" });
    const rows = all.filter((label) => !data.always.includes(label));
    const count = element("p", { class: "note" });
    const boxes = rows.map((label) =>
      element("input", { type: "checkbox", checked: chosen.get(chapter).includes(label) ? "" : null, onchange: update }),
    );
    const done = element("button", { type: "button", onclick: () => dialog.close() }, "draw these");
    function update() {
      const n = boxes.filter((box) => box.checked).length;
      for (const box of boxes) box.disabled = !box.checked && n >= MOST_DRAWN;
      count.textContent = `${n} of at most ${MOST_DRAWN} rows`;
      done.disabled = !n;
    }
    const labels = rows.map((label, i) => element("label", null, boxes[i], " " + label));
    dialog.append(element("div", { class: "head" }, count, done), element("div", { class: "choices" }, ...labels));
    dialog.addEventListener("close", () => {
      const picked = rows.filter((_, i) => boxes[i].checked);
      dialog.remove();
      if (!picked.length) return;
      chosen.set(chapter, picked);
      for (const [place, again] of drawn)
        if (place.dataset.figure && place.closest(`[data-chapter="${chapter}"]`)) again();
    });
    document.body.append(dialog);
    update();
    dialog.showModal();
  }

  // When

  const show = (place) => drawn.has(place) || (place.dataset.table ? showTable : showFigure)(place);
  const places = document.querySelectorAll("[data-table], [data-figure]");
  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries)
        if (isIntersecting) {
          near.unobserve(target);
          show(target);
        }
    },
    { rootMargin: "600px 0px" },
  );
  for (const place of places) near.observe(place);

  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === wide) return;
    wide = innerWidth;
    for (const [place, again] of drawn) if (place.dataset.figure && place.clientWidth) again();
  });

  function showAll() {
    for (const part of document.querySelectorAll("details")) part.open = true;
    for (const place of places) show(place);
    for (const [place, again] of drawn) if (place.dataset.table) again(true);
  }
  addEventListener("beforeprint", showAll);
  window.protofed = { showAll };

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const reached = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        const link = links.get(target.getAttribute("aria-labelledby"));
        if (link) link.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const section of document.querySelectorAll("section")) reached.observe(section);
})();
