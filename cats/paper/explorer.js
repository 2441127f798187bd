"use strict";
// The statistics of the page: what cats.stats computes, on the same quantised numbers, to the last
// exit. ε is a whole number e of 1/parts, so every rank is found in whole numbers. Layers count
// from 1 and an input leaves where its score is strictly above the threshold, as in all of cats.

const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const PLACE = new Uint8Array(128);
[...LETTERS].forEach((letter, i) => {
  PLACE[letter.charCodeAt(0)] = i;
});
const DELTA = 100n; // δ of pac, ltt and band is one in so many

function unpack(text, letters) {
  const codes = new Uint16Array(text.length / letters);
  for (let i = 0; i < codes.length; i++) {
    for (let j = 0; j < letters; j++)
      codes[i] = 64 * codes[i] + PLACE[text.charCodeAt(letters * i + j)];
  }
  return codes;
}

// A table of the data, by measure: scores and agreement (n × early), what layers said (n × l).
function openTable(data, index, measure) {
  const table = data.tables[index],
    l = table.layers,
    early = l - 1,
    n = table.rows.length;
  const width = table.classes.length ? 1 : 2;
  const said = unpack(table.said, width),
    labels = unpack(table.labels, width);
  const scores = Float64Array.from(unpack(table.scores[measure], 2), (code) => data.grid[code]);
  const agrees = new Uint8Array(n * early);
  for (let i = 0; i < n; i++) {
    for (let k = 0; k < early; k++) {
      agrees[i * early + k] = Math.abs(said[i * l + k] - said[i * l + early]) <= table.reach;
    }
  }
  const half = Math.floor(n / 2),
    size = data.sizes[half];
  return {
    l,
    early,
    n,
    half,
    parts: data.parts,
    sequence: data.sequence,
    tuned: unpack(size.tuned, 1),
    band: size.band,
    reach: table.reach,
    scores,
    agrees,
    said,
    labels,
  };
}

// V of the calibration half: the largest score of an inconsistent layer (or record), -∞ if none.
function worst(set, onlyRecords) {
  const found = [],
    { early, scores, agrees } = set;
  for (let i = 0; i < set.half; i++) {
    let value = -Infinity,
      best = -Infinity,
      wrong = false;
    for (let k = i * early; k < (i + 1) * early; k++) {
      if (!agrees[k]) {
        wrong = true;
        if (!onlyRecords || scores[k] > best) value = Math.max(value, scores[k]);
      }
      best = Math.max(best, scores[k]);
    }
    found.push({ value, wrong });
  }
  return found;
}

// How often G ≠ F among some calibration inputs under a threshold t for all layers: `start` below
// every score, and with each step at most t its change on top. An input leaves a record for its
// next one as soon as t reaches its score.
function errorCurve(set, inside) {
  const { early, scores, agrees } = set,
    steps = [];
  let start = 0;
  for (let i = 0; i < set.half; i++) {
    if (!inside(i)) continue;
    let best = -Infinity,
      last = 0;
    for (let k = i * early; k < (i + 1) * early; k++) {
      if (!(scores[k] > best)) continue;
      const wrong = agrees[k] ? 0 : 1;
      if (best === -Infinity) start += wrong;
      else steps.push([best, wrong - last]);
      best = scores[k];
      last = wrong;
    }
    steps.push([best, -last]);
  }
  return { start, steps: steps.sort((a, b) => a[0] - b[0]) };
}

// That count at each of some thresholds, which rise.
function errorsAt({ start, steps }, thresholds) {
  let errors = start,
    next = 0;
  return thresholds.map((t) => {
    for (; next < steps.length && steps[next][0] <= t; next++) errors += steps[next][1];
    return errors;
  });
}

const sorted = (values) => Float64Array.from(values).sort();

// What calibrators need sorted, once a table and measure.
function prepare(set) {
  const all = worst(set, false);
  set.some = sorted(all.filter((input) => input.wrong).map((input) => input.value));
  set.all = sorted(all.map((input) => input.value));
  set.records = sorted(worst(set, true).map((input) => input.value));
  set.layers = [];
  for (let k = 0; k < set.early; k++) {
    const wrong = [];
    for (let i = 0; i < set.half; i++) {
      if (!set.agrees[i * set.early + k]) wrong.push(set.scores[i * set.early + k]);
    }
    set.layers.push(sorted(wrong));
  }
  const tuning = errorCurve(set, (i) => set.tuned[i]);
  set.candidates = [-Infinity, ...new Set(tuning.steps.map((step) => step[0]))];
  set.tuning = errorsAt(tuning, set.candidates);
  const rising = [...set.sequence].reverse();
  set.errors = errorsAt(
    errorCurve(set, () => true),
    rising,
  ).reverse();
  return set;
}

// The ⌈(1 - e/parts)·(n+1)⌉-th smallest of n values, ∞ beyond the last (Lemma A.1).
function quantile(values, e, parts) {
  const rank = Math.ceil(((parts - e) * (values.length + 1)) / parts);
  return rank > values.length ? Infinity : values[rank - 1];
}

// The largest m with BinomCDF(m; n, e/parts) <= δ, -1 if there is none: in whole numbers.
const known = new Map();
function mostErrors(n, e, parts) {
  const name = `${n} ${e} ${parts}`;
  if (known.has(name)) return known.get(name);
  const divisor = (a, b) => (b ? divisor(b, a % b) : a);
  const shared = divisor(e, parts);
  const p = BigInt(e / shared),
    q = BigInt((parts - e) / shared),
    whole = (p + q) ** BigInt(n);
  let m = -1,
    term = q ** BigInt(n),
    sum = term;
  while (sum * DELTA <= whole && m < n) {
    m += 1;
    term = (term * BigInt(n - m) * p) / (BigInt(m + 1) * q);
    sum += term;
  }
  known.set(name, m);
  return m;
}

const everywhere = (set, threshold) => new Array(set.early).fill(threshold);
const CALIBRATORS = {
  static(set, e) {
    const needed = Math.ceil(((set.parts - e) * set.half) / set.parts);
    const first = set.layers.findIndex((wrong) => set.half - wrong.length >= needed);
    return set.layers.map((_, k) => (first >= 0 && k >= first ? -Infinity : Infinity));
  },
  threshold: (set, e) => everywhere(set, (set.parts - e) / set.parts),
  naive(set, e) {
    const allowed = Math.floor((e * set.tuned.reduce((a, b) => a + b)) / set.parts);
    return everywhere(set, set.candidates[set.tuning.findIndex((errors) => errors <= allowed)]);
  },
  independent: (set, e) => set.layers.map((wrong) => quantile(wrong, e, set.parts * set.early)),
  shared: (set, e) => everywhere(set, quantile(set.some, e, set.parts)),
  shared_all: (set, e) => everywhere(set, quantile(set.all, e, set.parts)),
  first_exit: (set, e) => everywhere(set, quantile(set.records, e, set.parts)),
  pac(set, e) {
    const m = mostErrors(set.half, e, set.parts);
    return everywhere(set, m >= 0 ? set.records[set.half - 1 - m] : Infinity);
  },
  ltt(set, e) {
    const m = mostErrors(set.half, e, set.parts),
      stands = set.errors.findIndex((errors) => errors > m),
      rejected = stands < 0 ? set.errors.length : stands;
    return everywhere(set, rejected ? set.sequence[rejected - 1] : Infinity);
  },
  band(set, e) {
    const level = (set.parts - e) / set.parts,
      rank = set.band.findIndex((bound) => bound >= level);
    return everywhere(set, rank < 0 ? Infinity : set.records[set.half - set.band.length + rank]);
  },
};

// Where the inputs of the test half leave.
function exitLayers(set, thresholds) {
  const exits = new Uint8Array(set.n - set.half);
  for (let i = 0; i < exits.length; i++) {
    const row = (set.half + i) * set.early;
    let k = 0;
    while (k < set.early && !(set.scores[row + k] > thresholds[k])) k += 1;
    exits[i] = k + 1;
  }
  return exits;
}

// Whether G = F for the i-th input of the test half.
const agree = (set, exits, i) =>
  exits[i] === set.l || set.agrees[(set.half + i) * set.early + exits[i] - 1] === 1;

function answer(set, method, e) {
  const thresholds = CALIBRATORS[method](set, e),
    exits = exitLayers(set, thresholds);
  let layers = 0,
    agreeing = 0;
  exits.forEach((exit, i) => {
    layers += exit;
    agreeing += agree(set, exits, i);
  });
  return { thresholds, exits, layers: layers / exits.length, agreement: agreeing / exits.length };
}

// Why a calibrator with a promise answers ∞ somewhere, in a sentence; else nothing.
function whyNot(set, method, e, thresholds) {
  const shut = thresholds.filter((value) => value === Infinity).length;
  if (!shut || method === "static" || method === "threshold") return "";
  let have = set.half,
    what = "calibration inputs",
    need = Math.ceil(set.parts / e) - 1;
  if (method === "shared") {
    have = set.some.length;
    what = "calibration inputs that some layer gets wrong";
  } else if (method === "pac" || method === "ltt") {
    need = Math.ceil(-Math.log(Number(DELTA)) / Math.log1p(-e / set.parts));
  } else if (method === "independent") {
    need = Math.ceil((set.parts * set.early) / e) - 1;
    have = Math.min(...set.layers.map((wrong) => wrong.length));
    what = "calibration inputs that a layer gets wrong, at every layer";
  }
  const then =
    shut === set.early
      ? "So every input runs through all layers."
      : `So ${shut} of ${set.early} early layers stay shut.`;
  if (method === "band") {
    const most = (100 * set.band[set.band.length - 1]).toFixed(2);
    return `The band of ${have.toLocaleString("en")} calibration inputs ends at ${most} %. ${then}`;
  }
  if (have >= need)
    return `The strictest of its thresholds already errs too often for ${have} ${what}. ${then}`;
  return `It needs ${need.toLocaleString("en")} ${what}; there are ${have}. ${then}`;
}
