// The page: what is chosen, what is drawn, what is said; the numbers come from explorer.js.

const PROMISES = {
  static: [
    "No promise.",
    "One layer for all inputs: the first that agreed with F on {target} of the calibration inputs.",
  ],
  threshold: [
    "No promise.",
    "Leave where the confidence exceeds 1 − ε = {target}, as if it were a probability one can " +
      "trust.",
  ],
  naive: [
    "No promise of {target}, only a bound on what came out.",
    "Section 3.3 of the paper: the smallest threshold that is consistent enough on one half of the " +
      "calibration inputs. Proposition 3.1 bounds its agreement by the other half, wherever that " +
      "may lie.",
  ],
  independent: [
    "P(G = F) ≥ {target}",
    "Theorem 4.4 of the paper: a threshold for each layer, from the inputs that layer gets " +
      "wrong, each with ε/(l−1) of the errors.",
  ],
  shared: [
    "P(G = F) ≥ {target}, even among the inputs that some layer gets wrong",
    "Theorem 4.6 of the paper: one threshold for all layers. It promises more than was asked " +
      "for, and pays for it in layers.",
  ],
  shared_all: [
    "P(G = F) ≥ {target}",
    "As shared, but over all inputs: those that every layer gets right count, too.",
  ],
  first_exit: [
    "P(G = F) ≥ {target}",
    "As shared_all, but only layers at which an input could leave count: those more confident " +
      "than every layer before.",
  ],
  pac: [
    "With 99 % confidence in the calibration set: G = F on at least {target} of all inputs to come",
    "A binomial bound on the statistic of first_exit: stricter, for the promise holds for " +
      "this calibration set and not only on average.",
  ],
  ltt: [
    "With 99 % confidence in the calibration set: G = F on at least {target} of all inputs to come",
    "Learn then test: thresholds fixed beforehand, from strict to loose, each tested on how often " +
      "G really differs from F, until one fails.",
  ],
  band: [
    "With 99 % confidence in the calibration set, for all ε up to ½ at once: G = F on at least " +
      "{target} of all inputs to come",
    "As pac, with a band around all ranks: the one calibrator whose ε may be chosen by looking.",
  ],
};
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const target = (e, parts) => `${+((100 * (parts - e)) / parts).toFixed(2)} %`;
const many = (number) => number.toLocaleString("en");

const TITLES = {
  independent: " (Theorem 4.4)",
  shared: " (Theorem 4.6)",
  static: " (no promise)",
  threshold: " (no promise)",
  naive: " (a bound alone)",
  pac: " (99 % confident)",
  ltt: " (99 % confident)",
  band: " (99 % confident, every ε)",
};
const CONFIDENT = ["pac", "ltt", "band"]; // in the one calibration set there is
const CHOICES = {
  task: "Task",
  encoder: "Encoder F",
  recipe: "Recipe of the heads",
  method: "Calibrator",
  measure: "Confidence measure",
};
const LEFT = 46,
  RIGHT = 82; // margins of the curves

function start(data) {
  const at = (id) => document.getElementById(id);
  const make = (name, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const write = (x, y, words, attributes = {}) => make("text", { x, y, ...attributes }, words);
  const name = (slug) => {
    const [first, ...more] = slug.split(", ");
    return [data.names[first] || first, ...more].join(", ");
  };
  at("choices").append(
    ...Object.entries(CHOICES).map(([id, words]) => {
      const label = document.createElement("label");
      label.append(words, Object.assign(document.createElement("select"), { id }));
      return label;
    }),
  );
  const notches = [...data.epsilons].sort((a, b) => b - a); // to the right is stricter
  const state = {
    method: "first_exit",
    measure: "meta",
    notch: notches.indexOf(500),
    input: null,
    layer: null,
  };
  const sets = new Map(),
    curves = new Map();

  function set() {
    const key = `${state.table} ${state.measure}`;
    if (!sets.has(key)) sets.set(key, prepare(openTable(data, state.table, state.measure)));
    return sets.get(key);
  }
  // agreement and layers of every calibrator at every notch
  function allNotches() {
    const key = `${state.table} ${state.measure}`;
    if (!curves.has(key)) {
      curves.set(
        key,
        Object.keys(data.methods).map((method) =>
          notches.map((e) => {
            const { layers, agreement } = answer(set(), method, e);
            return { layers, agreement };
          }),
        ),
      );
    }
    return curves.get(key);
  }

  // -- choices: what there is decides what can be chosen next
  const key = (table) => (table.seed ? `${table.recipe}, seed ${table.seed}` : table.recipe);
  const fill = (id, options, chosen) => {
    at(id).replaceChildren(
      ...options.map(
        ([value, words]) => new Option(words, value, value === chosen, value === chosen),
      ),
    );
    at(id).disabled = options.length < 2;
    return options.some(([value]) => value === chosen) ? chosen : options[0][0];
  };
  const unique = (values) => [...new Set(values)];
  function choose(wish) {
    let left = data.tables.map((table, index) => ({ ...table, index, recipe: key(table) }));
    for (const field of ["task", "encoder", "recipe"]) {
      const there = unique(left.map((table) => table[field]));
      state[field] = fill(
        field,
        there.map((value) => [value, name(value)]),
        there.includes(wish[field]) ? wish[field] : there[0],
      );
      left = left.filter((table) => table[field] === state[field]);
    }
    state.table = left[0].index;
    const measures = Object.keys(data.tables[state.table].scores);
    state.measure = fill(
      "measure",
      measures.map((value) => [value, data.measures[value]]),
      measures.includes(wish.measure) ? wish.measure : measures[0],
    );
    state.method = fill(
      "method",
      Object.keys(data.methods).map((value) => [value, value + (TITLES[value] || "")]),
      wish.method in data.methods ? wish.method : "first_exit",
    );
  }

  // -- what is shown
  function show() {
    const now = set(),
      table = data.tables[state.table],
      e = notches[state.notch],
      parts = data.parts;
    const found = answer(now, state.method, e),
      { thresholds, exits } = found;
    const said = target(e, parts),
      epsilon = e / parts,
      promises = !PROMISES[state.method][0].startsWith("No");
    const noise = 2 * Math.sqrt(epsilon * (1 - epsilon) * (1 / now.half + 1 / exits.length));
    const short = 1 - epsilon - found.agreement;
    Object.assign(state, { found });

    at("said").textContent =
      `ε = ${epsilon}: ${promises ? "promised" : "wanted"}, G = F on at least ${said}`;
    at("epsilon").setAttribute("aria-valuetext", `ε = ${epsilon}, target ${said}`);
    const verdict =
      short <= 0
        ? `${(-100 * short).toFixed(1)} above ${said}`
        : `${(100 * short).toFixed(1)} below ` +
          `${said}${promises && short <= noise ? ", within chance" : ""}`;
    tile("agreement", percent(found.agreement), verdict, short > 0 && (short > noise || !promises));
    tile("layers", found.layers.toFixed(2), `of ${now.l}, on average`);
    tile("spared", percent(1 - found.layers / now.l, 0), "of the layers");
    const finite = unique(thresholds.filter(Number.isFinite));
    const shown = (value) =>
      value > 0.9995 ? `1 − ${(1 - value).toExponential(1)}` : value.toFixed(4);
    if (state.method === "static") {
      const layer = thresholds.indexOf(-Infinity) + 1 || now.l;
      tile("threshold", "none", `all leave at layer ${layer}`);
    } else if (!finite.length)
      tile("threshold", "∞", thresholds[0] > 0 ? "nothing leaves early" : "");
    else if (state.method === "independent")
      tile(
        "threshold",
        shown(Math.min(...finite)),
        `lowest; ${finite.length} of ${now.early} layers open`,
      );
    else tile("threshold", shown(finite[0]), "leave above it");
    if (thresholds.every((value) => value === -Infinity))
      tile("threshold", "−∞", "all leave at layer 1");
    at("live").textContent =
      `Target ${said}: agreement ${percent(found.agreement)}, ${found.layers.toFixed(2)} of ` +
      `${now.l} layers.`;

    const [promise, how] = PROMISES[state.method].map((words) => words.replace("{target}", said));
    const why = whyNot(now, state.method, e, thresholds),
      box = at("promise");
    box.className = promises ? "promise" : "promise none";
    box.replaceChildren(paragraph(bold(promise)), paragraph(how));
    if (why) box.append(paragraph(bold(why)));
    smallPrint(now, promises, said, noise);
    histogram(now, exits, found);
    drawCurves(now);
    listInputs(now, exits);
    way(now, table, thresholds, exits);
    remember();
  }
  function tile(id, number, words, below = false) {
    const small = document.createElement("small");
    small.textContent = words;
    at(id).replaceChildren(number, small);
    at(id).className = below ? "below" : "";
  }
  // figures are drawn in pixels, so that letters keep their size on a phone
  const room = (svg) => Math.max(300, Math.round(svg.parentNode.getBoundingClientRect().width));
  const spacing = (step) => [1, 2, 4, 6, 12].find((every) => every * step >= 22) || 24;
  const bold = (words) => Object.assign(document.createElement("b"), { textContent: words });
  const paragraph = (...parts) => {
    const p = document.createElement("p");
    p.append(...parts);
    return p;
  };

  function smallPrint(now, promises, said, noise) {
    const lines = [
      `Here ${many(now.half)} inputs calibrate and ${many(now.n - now.half)} others test, ` +
        `drawn once from the test set of ${name(state.task)}. ` +
        (CONFIDENT.includes(state.method)
          ? ""
          : promises
            ? "The promise is an average over such draws. "
            : "") +
        `Around a target of ${said} one draw strays by up to ± ${(100 * noise).toFixed(1)} ` +
        `points (two standard deviations), so a little below is no broken promise.`,
      "Agreement with F is promised, not being right: where F errs, so may G. No labels are " +
        "needed to calibrate.",
      [...CONFIDENT, "naive"].includes(state.method)
        ? "It needs independent inputs: rows that share a page or a user are not."
        : "It needs new inputs that are exchangeable with the calibration inputs: after a " +
          "change of topic or source, calibrate again.",
      state.method === "band"
        ? "Measure and calibrator must be fixed before the calibration inputs are seen; ε need " +
          "not be: move the slider until you like what you see."
        : "ε, measure and calibrator must be fixed before the calibration inputs are seen. " +
          "Moving the slider until you like what you see is looking: good for a feeling, not for " +
          "a promise (only band allows it).",
      "The package's crc, which bounds a mean loss, is first_exit where the loss is G ≠ F.",
      "Scores here are rounded to steps of 0.005 in log-odds, so numbers differ a little from " +
        "those of the figures, which use all inputs.",
    ];
    if (now.reach)
      lines.splice(
        1,
        0,
        `A regression: G = F means that the two are at most ${now.reach / data.unit} apart.`,
      );
    at("small").replaceChildren(
      ...lines.map((words) => Object.assign(document.createElement("li"), { textContent: words })),
    );
  }

  function histogram(now, exits, found) {
    const svg = at("histogram"),
      width = room(svg),
      height = 320,
      left = 42,
      bottom = 280,
      top = 18,
      step = (width - left) / now.l;
    const count = new Array(now.l).fill(0),
      wrong = new Array(now.l).fill(0);
    exits.forEach((exit, i) => {
      count[exit - 1] += 1;
      wrong[exit - 1] += !agree(now, exits, i);
    });
    const most = Math.max(...count) / exits.length,
      unit = most > 0.5 ? 0.2 : most > 0.2 ? 0.1 : most > 0.1 ? 0.05 : 0.02;
    const high = Math.ceil(most / unit - 1e-9) * unit,
      y = (share) => bottom - ((bottom - top) * share) / high;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    for (let share = 0; share <= high + 1e-9; share += unit) {
      svg.append(
        make("line", { x1: left, x2: width, y1: y(share), y2: y(share), class: "axis" }),
        write(left - 6, y(share) + 4, percent(share, 0), { "text-anchor": "end" }),
      );
    }
    const every = spacing(step);
    count.forEach((number, k) => {
      const x = left + k * step,
        good = (number - wrong[k]) / exits.length,
        words = `layer ${k + 1}: ${number} inputs, ${wrong[k]} of them with G ≠ F`;
      const bar = make(
        "g",
        { class: k + 1 === state.layer ? "bar picked" : "bar", "data-layer": k + 1 },
        make("title", {}, words),
        make("rect", { x, width: step, y: top, height: bottom - top, class: "area" }),
        make("rect", {
          x: x + step * 0.12,
          width: step * 0.76,
          y: y(good),
          height: bottom - y(good),
          class: "agrees",
        }),
        make("rect", {
          x: x + step * 0.12,
          width: step * 0.76,
          y: y(number / exits.length),
          height: y(good) - y(number / exits.length),
          class: "differs",
        }),
      );
      bar.addEventListener("click", () => {
        state.layer = k + 1;
        state.input = null;
        show();
      });
      svg.append(bar);
      if ((k + 1) % every === 0 || k === 0)
        svg.append(write(x + step / 2, bottom + 16, k + 1, { "text-anchor": "middle" }));
    });
    const mean = left + (found.layers - 0.5) * step,
      side = mean > width * 0.75 ? "end" : "start";
    svg.append(
      make("line", {
        x1: mean,
        x2: mean,
        y1: top - 6,
        y2: bottom,
        class: "now",
        "stroke-dasharray": "4 3",
      }),
      write(mean + (side === "end" ? -5 : 5), top + 3, `mean ${found.layers.toFixed(2)}`, {
        "text-anchor": side,
        class: "strong",
      }),
      write((left + width) / 2, height - 3, `exit layer (of ${now.l})`, {
        "text-anchor": "middle",
      }),
    );
    const busiest = count.indexOf(Math.max(...count)) + 1;
    svg.setAttribute(
      "aria-label",
      `Histogram of exit layers: mean ${found.layers.toFixed(2)} of ${now.l}; most inputs, ` +
        `${percent(count[busiest - 1] / exits.length, 0)}, leave at layer ${busiest}.`,
    );
    at("histogram-caption").textContent =
      `Share of ${many(exits.length)} test inputs; orange on top of the bars where G ≠ F ` +
      `(${wrong.reduce((a, b) => a + b)} inputs). Click a bar to see inputs that leave there.`;
  }

  function drawCurves(now) {
    const svg = at("curves"),
      width = room(svg),
      left = LEFT,
      right = width - RIGHT,
      all = allNotches(),
      methods = Object.keys(data.methods);
    const panels = [
      { top: 20, bottom: 120, of: "agreement" },
      { top: 150, bottom: 280, of: "layers" },
    ];
    const log = (e) => Math.log(e),
      low = log(notches[0]),
      high = log(notches[notches.length - 1]);
    const x = (e) => left + ((right - left) * (log(e) - low)) / (high - low);
    svg.setAttribute("viewBox", `0 0 ${width} 320`);
    svg.replaceChildren();
    const reach = 0.06,
      scale = ({ top, bottom, of }, value) =>
        of === "layers"
          ? bottom - ((bottom - top) * value) / now.l
          : (top + bottom) / 2 - ((bottom - top) / 2) * Math.max(-1, Math.min(1, value / reach));
    for (const panel of panels) {
      const ticks =
        panel.of === "layers"
          ? [0, now.l / 4, now.l / 2, (3 * now.l) / 4, now.l]
          : [-reach, -reach / 2, 0, reach / 2, reach];
      if (panel.of === "agreement") {
        svg.append(
          make("rect", {
            x: left,
            width: right - left,
            y: scale(panel, 0),
            height: panel.bottom - scale(panel, 0),
            class: "zone",
          }),
          write(left + 6, panel.bottom - 6, "below the target"),
        );
      }
      for (const tick of ticks) {
        const words =
          panel.of === "layers"
            ? tick
            : (tick > 0 ? "+" : tick < 0 ? "−" : "") + Math.abs(100 * tick).toFixed(0);
        svg.append(
          make("line", {
            x1: left,
            x2: right,
            y1: scale(panel, tick),
            y2: scale(panel, tick),
            class: "axis",
          }),
          write(left - 6, scale(panel, tick) + 4, words, { "text-anchor": "end" }),
        );
      }
      const ends = [];
      methods.forEach((method, i) => {
        const points = notches.map((e, j) => {
          const value =
            panel.of === "layers" ? all[i][j].layers : all[i][j].agreement - (1 - e / data.parts);
          return [x(e), scale(panel, value)];
        });
        const picked = method === state.method;
        svg.append(
          make(
            "polyline",
            {
              points: points
                .map((point) => point.map((value) => value.toFixed(1)).join(","))
                .join(" "),
              class: picked ? "line picked" : "line",
              stroke: data.methods[method],
              "stroke-dasharray": PROMISES[method][0].startsWith("No") ? "5 3" : "none",
            },
            make("title", {}, method),
          ),
        );
        ends.push({ method, y: points[state.notch][1] });
      });
      if (panel.of === "layers") label(svg, ends, right + 6, panel.bottom);
      const here = x(notches[state.notch]);
      svg.append(
        make("line", { x1: here, x2: here, y1: panel.top, y2: panel.bottom, class: "now" }),
      );
    }
    for (const e of [5000, 2000, 1000, 500, 100, 10].filter((e) => width > 400 || e !== 1000))
      svg.append(write(x(e), 297, target(e, data.parts), { "text-anchor": "middle" }));
    svg.append(
      write(left - 40, 10, "agreement minus target, points", { class: "strong" }),
      write(left - 40, 141, `layers used (of ${now.l})`, { class: "strong" }),
      write((left + right) / 2, 316, "target 1 − ε (logarithmic in ε)", {
        "text-anchor": "middle",
      }),
    );
    const best = methods
      .filter((method) => !PROMISES[method][0].startsWith("No"))
      .sort(
        (a, b) =>
          all[methods.indexOf(a)][state.notch].layers - all[methods.indexOf(b)][state.notch].layers,
      )[0];
    const at95 = all[methods.indexOf(state.method)][state.notch];
    svg.setAttribute(
      "aria-label",
      `Agreement and layers of all calibrators against the target. ${state.method} here: ` +
        `${percent(at95.agreement)}, ${at95.layers.toFixed(2)} layers; of those that promise, ` +
        `${best} needs the fewest layers.`,
    );
    at("curves-caption").textContent =
      "Every calibrator on the same inputs; the chosen one is thick, dashed ones promise " +
      "nothing. Names stand in the order of layers at this ε. Click to move ε.";
  }
  // names in the order of their lines, no two on top of each other
  function label(svg, ends, x, bottom) {
    const rows = ends.sort((a, b) => a.y - b.y),
      apart = 15;
    rows.forEach((row, i) => {
      row.at = Math.max(row.y + 4, i ? rows[i - 1].at + apart : 0);
    });
    rows.reduceRight((limit, row) => {
      row.at = Math.min(row.at, limit);
      return row.at - apart;
    }, bottom + 2);
    for (const row of rows) {
      svg.append(
        write(x, row.at, row.method, {
          style: `fill:${data.methods[row.method]}`,
          class: "name",
          "font-weight": row.method === state.method ? 700 : 400,
        }),
      );
    }
  }

  function listInputs(now, exits) {
    const only = at("wrong").checked,
      there = [];
    for (let k = 1; k <= now.l; k++) {
      const number = exits.filter(
        (exit, i) => exit === k && (!only || !agree(now, exits, i)),
      ).length;
      if (number) there.push([k, number]);
    }
    if (!there.some(([k]) => k === state.layer)) {
      const mean = state.found.layers;
      state.layer = there.length
        ? there.reduce((a, b) => (Math.abs(b[0] - mean) < Math.abs(a[0] - mean) ? b : a))[0]
        : null;
      document
        .querySelectorAll(".bar")
        .forEach((bar) => bar.classList.toggle("picked", +bar.dataset.layer === state.layer));
    }
    at("layer").replaceChildren(
      ...there.map(([k, number]) => new Option(`${k} (${number})`, k, false, k === state.layer)),
    );
    at("layer").disabled = !there.length;
    const rows = data.tables[state.table].rows,
      inside = [];
    exits.forEach((exit, i) => {
      if (exit === state.layer && (!only || !agree(now, exits, i))) inside.push(i);
    });
    if (!inside.includes(state.input)) state.input = inside.length ? inside[0] : null;
    const shown = inside.slice(0, 24);
    if (state.input !== null && !shown.includes(state.input)) shown[shown.length - 1] = state.input;
    at("inputs").replaceChildren(
      ...shown.map((i) => {
        const differs = !agree(now, exits, i),
          button = document.createElement("button");
        button.type = "button";
        button.textContent = `${rows[now.half + i]}${differs ? " ≠" : ""}`;
        button.className = differs ? "wrong" : "";
        button.setAttribute("aria-pressed", i === state.input);
        button.setAttribute(
          "aria-label",
          `row ${rows[now.half + i]}, G ${differs ? "differs from" : "agrees with"} F`,
        );
        button.addEventListener("click", () => {
          const place = shown.indexOf(i);
          state.input = i;
          show();
          at("inputs").children[place].focus();
        });
        return button;
      }),
    );
    if (inside.length > shown.length)
      at("inputs").append(
        Object.assign(document.createElement("small"), {
          textContent: `and ${many(inside.length - shown.length)} more`,
        }),
      );
    if (!inside.length) at("inputs").append("There is none: G = F on all test inputs.");
  }

  function way(now, table, thresholds, exits) {
    const svg = at("way"),
      story = at("story"),
      rows = at("steps"),
      i = state.input;
    svg.replaceChildren();
    rows.replaceChildren();
    story.textContent = "";
    svg.style.display = i === null ? "none" : "";
    if (i === null) return;
    const say = (code) =>
      table.classes.length ? table.classes[code] : (code / data.unit - data.shift).toFixed(2);
    const row = now.half + i,
      said = now.said.subarray(row * now.l, (row + 1) * now.l),
      last = said[now.early],
      exit = exits[i];
    const good = agree(now, exits, i),
      same = (code) => Math.abs(code - last) <= table.reach;
    story.replaceChildren(
      `Row ${table.rows[row]} leaves at layer `,
      bold(exit),
      ` of ${now.l} with the answer `,
      bold(say(said[exit - 1])),
      ". ",
      exit === now.l
        ? "That is F itself. "
        : `F says ${say(last)}: ` +
            `${good ? "they agree. " : "they do not agree, one of the inputs that ε allows for. "}`,
      now.labels.length ? `The label is ${say(now.labels[row])}.` : "",
    );

    const width = room(svg),
      left = 62,
      right = width - 4,
      top = 22,
      bottom = 236,
      step = (right - left) / now.l,
      every = spacing(step);
    const odds = (p) => Math.log(p / (1 - p)),
      own = [...now.scores.subarray(row * now.early, (row + 1) * now.early), ...thresholds].filter(
        (p) => p > 0 && p < 1,
      );
    const low = Math.min(-0.5, ...own.map(odds)) - 0.5,
      high = Math.max(3, ...own.map(odds)) + 0.5,
      size = Math.min(6, step * 0.35);
    const y = (p) =>
        bottom - ((bottom - top) * (Math.max(low, Math.min(high, odds(p))) - low)) / (high - low),
      x = (k) => left + (k - 0.5) * step;
    svg.setAttribute("viewBox", `0 0 ${width} 322`);
    for (const p of [0.1, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999].filter(
      (p) => odds(p) > low && odds(p) < high,
    )) {
      svg.append(
        make("line", { x1: left, x2: right, y1: y(p), y2: y(p), class: "axis" }),
        write(left - 8, y(p) + 4, p, { "text-anchor": "end" }),
      );
    }
    thresholds.forEach((value, k) => {
      if (!Number.isFinite(value)) return;
      svg.append(
        make("line", {
          x1: x(k + 1) - step / 2,
          x2: x(k + 1) + step / 2,
          y1: y(value),
          y2: y(value),
          class: "now",
          "stroke-dasharray": "6 3",
        }),
      );
    });
    if (thresholds[0] === thresholds[now.early - 1] && Number.isFinite(thresholds[0]))
      svg.append(
        write(right, y(thresholds[0]) - 6, "threshold τ", {
          "text-anchor": "end",
          class: "strong",
        }),
      );
    for (let k = 1; k <= now.l; k++) {
      const ran = k <= exit,
        right_ = same(said[k - 1]),
        cx = x(k);
      if (k < now.l) {
        const cy = y(now.scores[row * now.early + k - 1]),
          look = {
            style:
              `stroke:var(${right_ ? "--good" : "--bad"});stroke-width:2;` +
              `fill:${ran && right_ ? "var(--good)" : "none"};opacity:${ran ? 1 : 0.4}`,
          };
        svg.append(
          right_
            ? make("circle", { cx, cy, r: size, ...look })
            : make("path", {
                d:
                  `M${cx - size} ${cy - size}l${2 * size} ${2 * size}` +
                  `m0 ${-2 * size}l${-2 * size} ${2 * size}`,
                ...look,
              }),
        );
      }
      svg.append(
        make(
          "rect",
          {
            x: cx - step * 0.44,
            width: step * 0.88,
            y: 250,
            height: 14,
            rx: 3,
            class: ran ? (right_ ? "agrees" : "differs") : "not",
          },
          make("title", {}, `layer ${k} says ${say(said[k - 1])}`),
        ),
      );
      if (k === 1 || k % every === 0)
        svg.append(
          write(cx, 300, k, { "text-anchor": "middle", class: k === exit ? "strong" : "" }),
        );
    }
    // the same answer in a row is written once, where there is room for it
    for (let from = 1, to = 1; from <= now.l; from = to + 1) {
      for (to = from; to < now.l && say(said[to]) === say(said[from - 1]); to++);
      const words = say(said[from - 1]);
      if ((to - from + 1) * step > 6.6 * words.length)
        svg.append(
          write((x(from) + x(to)) / 2, 280, words, {
            "text-anchor": "middle",
            class: from <= exit ? "strong" : "",
          }),
        );
    }
    svg.append(
      make("line", {
        x1: x(exit) + step / 2,
        x2: x(exit) + step / 2,
        y1: top - 8,
        y2: 266,
        class: "now",
      }),
      write(x(exit) + step / 2 + (exit > now.l * 0.7 ? -6 : 6), top, `leaves at layer ${exit}`, {
        class: "strong",
        "text-anchor": exit > now.l * 0.7 ? "end" : "start",
      }),
      write(left - 8, 261, "says", { "text-anchor": "end" }),
      write((left + right) / 2, 317, "layer", { "text-anchor": "middle" }),
    );
    const body = [["layer", "confidence", "threshold", "says", "as F?", "run?"]];
    for (let k = 1; k <= now.l; k++) {
      const limit = k < now.l ? thresholds[k - 1] : -Infinity;
      body.push([
        k,
        k < now.l ? now.scores[row * now.early + k - 1].toFixed(6) : "",
        Number.isFinite(limit) ? limit.toFixed(6) : limit > 0 ? "∞" : "none",
        say(said[k - 1]),
        same(said[k - 1]) ? "yes" : "no",
        k <= exit ? "yes" : "no",
      ]);
    }
    body.forEach((cells, r) => {
      const line = rows.insertRow();
      cells.forEach((words) => {
        const cell = document.createElement(r ? "td" : "th");
        cell.textContent = words;
        line.append(cell);
      });
    });
    const wrong = [...said.subarray(0, now.early)].filter((code) => !same(code)).length;
    svg.setAttribute(
      "aria-label",
      `Confidence of row ${table.rows[row]} at each layer. It leaves at layer ${exit} of ` +
        `${now.l}; ${wrong} of ${now.early} early layers do not say what F says. All numbers ` +
        `are in the table below.`,
    );
  }

  // -- what was chosen is in the address, so that it can be kept and sent
  function remember() {
    const { task, encoder, recipe, method, measure } = state;
    const words = new URLSearchParams({
      task,
      encoder,
      recipe,
      method,
      measure,
      epsilon: notches[state.notch] / data.parts,
    });
    try {
      history.replaceState(null, "", `#${words}`);
    } catch {
      /* some browsers refuse it for files */
    }
  }
  function recall() {
    const wish = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const e = Math.round(wish.epsilon * data.parts);
    if (e > 0)
      state.notch = notches.reduce(
        (best, value, i) => (Math.abs(value - e) < Math.abs(notches[best] - e) ? i : best),
        0,
      );
    at("epsilon").value = state.notch;
    choose({ task: "ag_news", ...state, ...wish });
    show();
  }

  at("epsilon").max = notches.length - 1;
  at("ticks").append(
    ...[5000, 2000, 1000, 500, 200, 100, 10].map((e) => {
      const mark = Object.assign(document.createElement("span"), {
        textContent: target(e, data.parts),
      });
      mark.style.left = `${(100 * notches.indexOf(e)) / (notches.length - 1)}%`;
      return mark;
    }),
  );
  at("epsilon").addEventListener("input", () => {
    state.notch = +at("epsilon").value;
    show();
  });
  for (const field of Object.keys(CHOICES)) {
    at(field).addEventListener("change", () => {
      choose({ ...state, [field]: at(field).value });
      show();
    });
  }
  at("layer").addEventListener("change", () => {
    state.layer = +at("layer").value;
    state.input = null;
    show();
  });
  at("wrong").addEventListener("change", () => {
    state.input = null;
    show();
  });
  at("curves").addEventListener("click", (event) => {
    const box = at("curves").getBoundingClientRect(),
      place = event.clientX - box.left;
    const low = Math.log(notches[0]),
      high = Math.log(notches[notches.length - 1]),
      wanted = low + ((high - low) * (place - LEFT)) / (box.width - LEFT - RIGHT);
    state.notch = notches.reduce(
      (best, e, i) =>
        Math.abs(Math.log(e) - wanted) < Math.abs(Math.log(notches[best]) - wanted) ? i : best,
      0,
    );
    at("epsilon").value = state.notch;
    show();
  });
  window.addEventListener("hashchange", recall);
  window.addEventListener("resize", show);
  recall();
}

if (typeof document !== "undefined") start(JSON.parse(document.getElementById("data").textContent));
