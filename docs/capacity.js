"use strict";
// The calculator of capacity.md. Formats, models and GPUs come from sparsemla_lab.capacity, whose
// function it repeats; tests/test_capacity.py compares them.

function capacity(tables, set) {
  const rows = tables.models[set.model].rows;
  const sizes = { cache: tables.formats[set.cache_format], index: tables.formats[set.index_format] };
  const ofRow = (each) => each.layers * (typeof each.of === "number" ? each.of : sizes[each.of]);
  const rowsRead = (each) => {
    const all = each.ratio ? Math.floor(set.context / each.ratio) : each.kept;
    return Math.min(all, set.context, each.read === null ? all : each.read);
  };
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  const left = (set.memory_gib * set.used_percent) / 100 - set.weights_gib / set.gpus;
  const free = Math.max(Math.floor(left * 2 ** 30), 0);
  const hosted = rows.filter((each) => set.host_gib && each.on_host);
  const grown = rows.filter((each) => each.ratio && !hosted.includes(each));
  const perToken = sum(grown.map((each) => ofRow(each) / each.ratio));
  const fixed = rows.filter((each) => !each.ratio);
  const perRequest = sum(fixed.map((each) => ofRow(each) * each.kept));
  const step = sum(rows.map((each) => ofRow(each) * rowsRead(each)));
  const layers = (of) => sum(of.map((each) => each.layers));
  let hot = layers(hosted) * set.rows_per_seat * tables.hot_row_bytes[set.cache_format];
  if (hosted.length) hot += 12 * set.rows_per_seat * layers(grown);
  const hostPerToken = sum(hosted.map(ofRow));
  const sharing = set.share === "context" ? set.gpus : 1;
  const pool = free * sharing;
  const kept = perRequest + hot * sharing;
  let requests = Math.floor(pool / (set.context * perToken + kept));
  let tokens = Math.floor((pool - kept) / perToken);
  if (hosted.length) {
    const host = Math.floor(set.host_gib * 2 ** 30) / Math.floor(set.gpus / sharing);
    requests = Math.min(requests, Math.floor(host / (set.context * hostPerToken)));
    tokens = Math.min(tokens, Math.floor(host / hostPerToken));
  }
  return {
    free_bytes: free,
    bytes_per_token: perToken,
    bytes_per_request: perRequest,
    hot_bytes: hot,
    host_bytes_per_token: hostPerToken,
    tokens: Math.max(tokens, 0),
    requests: requests * (set.share === "data" ? set.gpus : 1),
    step_bytes: step,
    gpu_step_bytes: (requests * step) / sharing,
    rows: rows.map((each) => ({
      name: each.name,
      layers: each.layers,
      tokens: each.ratio || "",
      row_bytes: ofRow(each) / each.layers,
      token_bytes: each.ratio ? ofRow(each) / each.ratio : 0,
      request_bytes: each.ratio ? 0 : ofRow(each) * each.kept,
      read: rowsRead(each),
      read_bytes: ofRow(each) * rowsRead(each),
    })),
  };
}

function bytes(count) {
  if (count < 1e6) return `${count.toLocaleString("en", { maximumFractionDigits: 2 })} B`;
  return count < 2 ** 30 ? `${(count / 2 ** 20).toFixed(1)} MiB` : `${(count / 2 ** 30).toFixed(1)} GiB`;
}

function tokens(count) {
  return count < 1024 || count % 1024 ? count.toLocaleString("en") : `${count / 1024}K`;
}

// The page keeps the settings behind the # of its address, so that a link has them.
function calculator(root, tables) {
  const ranges = {
    gpus: ["GPUs", 1, 16, (value) => value],
    memory_gib: ["memory of a GPU", 16, 288, (value) => `${value} GiB`],
    weights_gib: ["weights of all GPUs", 0, 1600, (value) => `${value} GiB`],
    used_percent: ["memory for weights and cache", 50, 98, (value) => `${value}%`],
    host_gib: ["host memory for latent rows", 0, 4096, (value) => (value ? `${value} GiB` : "none")],
    rows_per_seat: ["hot rows of a request and layer", 11, 14, (value) => 2 ** value],
    context: ["tokens of a request", 10, 20, (value) => tokens(2 ** value)],
  };
  const choices = { model: "model", gpu: "GPU", cache_format: "latent rows", index_format: "index keys", share: "a GPU keeps" };
  const make = (tag, parent, properties = {}) =>
    parent.appendChild(Object.assign(document.createElement(tag), properties));
  const form = make("form", root, { className: "capacity" });
  const inputs = {};
  const labelled = (name, text, tag) => {
    make("label", form, { textContent: text, htmlFor: `capacity-${name}` });
    inputs[name] = make(tag, form, { id: `capacity-${name}` });
    return inputs[name];
  };
  const fill = (name, options) => {
    inputs[name].replaceChildren();
    for (const [value, text] of options) make("option", inputs[name], { value, textContent: text });
  };
  const named = (names) => names.map((name) => [name, `${name}: ${tables.formats[name]} bytes`]);
  const same = (names) => names.map((name) => [name, name]);

  for (const [name, text] of Object.entries(choices)) labelled(name, text, "select"), make("span", form);
  for (const [name, [text, min, max]] of Object.entries(ranges)) {
    Object.assign(labelled(name, text, "input"), { type: "range", min, max, step: 1 });
    make("output", form, { htmlFor: `capacity-${name}`, id: `capacity-${name}-value` });
  }
  const results = make("div", root, { id: "capacity-results" });
  results.setAttribute("aria-live", "polite");

  const table = (head, lines) => {
    const body = make("table", results, { className: "capacity-table" });
    const row = (tag, cells) => {
      const line = make("tr", body);
      for (const cell of cells) make(tag, line, { textContent: cell });
    };
    if (head) row("th", head);
    for (const cells of lines) row("td", cells);
  };

  const chooseModel = () => {
    const model = tables.models[inputs.model.value];
    fill("cache_format", named(model.cache));
    fill("index_format", named(model.index));
    inputs.weights_gib.value = model.weights_gib;
    inputs.context.max = Math.floor(Math.log2(model.context));
  };
  const chooseGpu = () => {
    inputs.memory_gib.value = tables.gpus[inputs.gpu.value][0];
  };
  const show = () => {
    const set = {};
    for (const [name, input] of Object.entries(inputs)) {
      set[name] = input.type === "range" ? Number(input.value) : input.value;
    }
    history.replaceState(null, "", `#${new URLSearchParams(set)}`);
    for (const [name, range] of Object.entries(ranges)) {
      document.getElementById(`capacity-${name}-value`).textContent = range[3](set[name]);
    }
    set.context = 2 ** set.context;
    set.rows_per_seat = 2 ** set.rows_per_seat;
    const found = capacity(tables, set);
    const bandwidth = tables.gpus[set.gpu][1];
    const milliseconds = (found.gpu_step_bytes / bandwidth / 1e9).toPrecision(3);
    results.replaceChildren();
    table(null, [
      [`requests of ${tokens(set.context)} tokens that fit at a time`, found.requests.toLocaleString("en")],
      ["most tokens of a single request", found.tokens.toLocaleString("en")],
      ["free memory of a GPU for the cache", bytes(found.free_bytes)],
      ["bytes of a token, all layers", bytes(found.bytes_per_token)],
      ["bytes of a request of any length", bytes(found.bytes_per_request)],
      ["a token of a request reads", bytes(found.step_bytes)],
      ["a decode step of all these requests reads, on each GPU", bytes(found.gpu_step_bytes)],
      [`at least, at ${bandwidth} TB/s`, `${milliseconds} ms`],
      ["bytes of a token in host memory", bytes(found.host_bytes_per_token)],
      ["hot rows of a request, on each GPU", bytes(found.hot_bytes)],
    ]);
    table(
      ["rows", "layers", "tokens a row", "a row", "a token", "a request", "rows read", "bytes read"],
      found.rows.map((each) => [
        each.name,
        each.layers,
        each.tokens,
        bytes(each.row_bytes),
        each.token_bytes ? bytes(each.token_bytes) : "",
        each.request_bytes ? bytes(each.request_bytes) : "",
        each.read.toLocaleString("en"),
        bytes(each.read_bytes),
      ]),
    );
  };

  fill("model", same(Object.keys(tables.models)));
  fill("gpu", same(Object.keys(tables.gpus)));
  fill("share", Object.entries(tables.shares));
  Object.assign(inputs.gpu, { value: "H200" });
  Object.assign(inputs.gpus, { value: 8 });
  Object.assign(inputs.used_percent, { value: 90 });
  Object.assign(inputs.context, { value: 17 });
  Object.assign(inputs.host_gib, { value: 0 });
  Object.assign(inputs.rows_per_seat, { value: 12 });
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const name of ["model", "gpu"]) if (wanted.has(name)) inputs[name].value = wanted.get(name);
  chooseModel();
  chooseGpu();
  for (const [name, value] of wanted) if (name in inputs) inputs[name].value = value;
  inputs.model.addEventListener("input", chooseModel);
  inputs.gpu.addEventListener("input", chooseGpu);
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

if (typeof module !== "undefined") module.exports = { capacity };
else {
  const tables = JSON.parse(document.getElementById("capacity-tables").textContent);
  calculator(document.getElementById("calculator"), tables);
}
