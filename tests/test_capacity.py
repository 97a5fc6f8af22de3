"""The calculator of capacity: in Python, in JavaScript, and as a page in a browser."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sparsemla import HotRows, PagedCache, Pooling, get_format
from sparsemla_lab.capacity import GPUS, MODELS, SHARES, capacity, tables

DOCS = Path(__file__).resolve().parent.parent / "docs"
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")


def settings(name, **chosen):
    model = MODELS[name]
    return {
        "model": name,
        "cache_format": model.cache[0].name,
        "index_format": model.index[0].name,
        "context": 131072,
        "gpus": 8,
        "memory_gib": 140,
        "weights_gib": model.weights_gib,
        "used_percent": 90,
        "share": "tensor",
    } | chosen


@pytest.mark.parametrize(
    ("model", "formats", "per_token", "per_request"),
    [
        ("DeepSeek-V3.2", ("fp8_ds_mla", "index_fp8"), 61 * (656 + 132), 0),
        ("GLM-5.2", ("fp8_ds_mla", "index_fp8"), 78 * 656 + 21 * 132, 0),
        ("DeepSeek-V4-Flash", ("fp8_584", "index_fp8"), 3850.25, 17_996_992),
        ("DeepSeek-V4-Flash", ("bf16_512v512", "bf16_128v128"), 6880, 20_570_112),
        ("DeepSeek-V4-Pro", ("fp8_584", "index_fp8"), 5511.4375, 27_028_800),
        ("DeepSeek-V4-Pro", ("bf16_512v512", "bf16_128v128"), 9848, 30_679_040),
    ],
)
def test_bytes_of_the_published_models(model, formats, per_token, per_request):
    """As ``test_sizes_of_the_published_models`` finds them in caches of DeepSeek-V4."""
    names = dict(zip(("cache_format", "index_format"), formats, strict=True))
    found = capacity(**settings(model, **names))
    assert (found.bytes_per_token, found.bytes_per_request) == (per_token, per_request)


def test_bytes_of_glm_5_3_flash():
    transformers = pytest.importorskip("transformers")
    from sparsemla.backends.transformers.glm5_next import PooledCache

    config = transformers.Glm5NextConfig().text_config
    layers = [i for i, kind in enumerate(config.layer_types) if kind != "linear_attention"]
    name = "GLM-5.3-Flash"
    latent, index = (getattr(MODELS[name], each)[0] for each in ("cache", "index"))
    sizes = {"page_size": 64, "batch_size": 1, "max_length": None}
    devices = dict.fromkeys(layers, torch.device("meta"))
    pooling = Pooling(config.index_kpool)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    cache = PooledCache(devices, layers, recurrent, pooling, latent, index, **sizes)
    linear = len(config.layer_types) - len(layers)
    state = config.linear_num_heads * config.linear_head_dim**2 * 4
    found = capacity(**settings(name))
    assert found.bytes_per_token == cache.bytes_per_token
    assert found.bytes_per_request == cache.states.row_bytes + linear * state


@pytest.mark.parametrize("model", MODELS)
def test_what_fits_is_allocated(model):
    """Pages of the rows of as many requests, of one more, and of a single request's tokens."""
    chosen = settings(model, context=8192, gpus=16, memory_gib=96)
    found = capacity(**chosen)

    def needed(requests, context):
        total = requests * found.bytes_per_request
        for rows in MODELS[model].rows:
            if rows.ratio:
                fmt = get_format(chosen[f"{rows.of}_format"])
                total += requests * rows.layers * (context // rows.ratio) * fmt.bytes_per_token
        return total

    assert needed(found.requests, 8192) <= found.free_bytes < needed(found.requests + 1, 8192)
    assert needed(1, found.tokens) <= found.free_bytes < needed(1, found.tokens + 128)
    fmt = get_format(chosen["cache_format"])
    cache = PagedCache.allocate(fmt, num_pages=2, page_size=1024, device="meta")
    assert cache.data.nbytes == pytest.approx(2048 * fmt.bytes_per_token, rel=1e-3)


def test_shares_of_the_rows():
    """Data parallel GPUs keep their own requests; context parallel ones divide each."""
    found = {share: capacity(**settings("DeepSeek-V3.2", share=share)) for share in SHARES}
    assert found["data"].requests == 8 * found["tensor"].requests
    assert found["data"].tokens == found["tensor"].tokens
    assert found["context"].tokens // 8 == found["tensor"].tokens
    assert found["context"].requests >= found["data"].requests
    step = found["tensor"].step_bytes
    assert step == 61 * (2048 * 656 + 131072 * 132)
    assert found["data"].gpu_step_bytes == found["tensor"].requests * step
    assert found["context"].gpu_step_bytes == found["context"].requests * step / 8


ON_HOST = [name for name, model in MODELS.items() if any(rows.on_host for rows in model.rows)]


def test_the_models_whose_rows_may_be_on_the_host():
    assert ON_HOST == ["DeepSeek-V3.2", "GLM-5.2", "GLM-5.3-Flash"]
    with pytest.raises(ValueError, match="host_gib must be 0 for DeepSeek-V4-Pro"):
        capacity(**settings("DeepSeek-V4-Pro", host_gib=100))


@pytest.mark.parametrize("model", ["DeepSeek-V3.2", "GLM-5.2"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("host_gib", [40, 700, 100_000])
def test_what_fits_with_rows_on_the_host(model, share, host_gib):
    """One request more exceeds a GPU or the host; the hot rows are those of HotRows."""
    chosen = settings(model, share=share, host_gib=host_gib, rows_per_seat=8192)
    found, resident = capacity(**chosen), capacity(**settings(model, share=share))
    latents, keys = MODELS[model].rows
    assert found.host_bytes_per_token == latents.layers * 656
    assert found.bytes_per_token == keys.layers * 132
    leaders = [layer * keys.layers // latents.layers for layer in range(latents.layers)]
    leaders = [leaders.index(leader) for leader in leaders]
    sizes = {"num_layers": latents.layers, "rows_per_seat": 8192, "topk": 2048}
    of_seats = [
        HotRows.size(chosen["cache_format"], seats=seats, leaders=leaders, **sizes)
        for seats in (1, 2)
    ]
    # Beside hot rows, a seat has room for its selection, once for all layers.
    assert 0 < of_seats[1] - of_seats[0] - found.hot_bytes < 300_000

    gpus = chosen["gpus"]
    on_a_gpu = found.requests // gpus if share == "data" else found.requests
    ranks = gpus if share == "context" else 1

    def fits(requests, context=chosen["context"]):
        gpu = requests * (context * found.bytes_per_token / ranks + found.hot_bytes)
        host = requests * context * found.host_bytes_per_token * (gpus // ranks)
        return gpu <= found.free_bytes and host <= host_gib * 2**30

    assert fits(on_a_gpu)
    assert not fits(on_a_gpu + 1)
    assert fits(1, found.tokens) or found.tokens == 0
    assert not fits(1, found.tokens + gpus)
    if host_gib == 100_000:
        assert found.requests > 1.5 * resident.requests
    assert found.step_bytes == resident.step_bytes


PLACES = [("tensor", 0), ("context", 0), ("tensor", 250), ("context", 250)]
"""Shares of the rows, and GiB of host memory for each GPU."""


def test_the_page_about_long_contexts_has_these_figures():
    page = (DOCS / "long-contexts.md").read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    fitting = [line for line in lines if line[0] in MODELS and line[1].isdigit()]
    assert len(fitting) == 8
    sizes = {"memory_gib": 40, "weights_gib": 0, "used_percent": 100}
    for name, gpus, *cells in fitting:
        for (share, host_gib), cell in zip(PLACES, cells, strict=True):
            counts = [
                capacity(
                    **settings(name, share=share, gpus=int(gpus), context=context, **sizes),
                    host_gib=host_gib * int(gpus),
                ).requests
                for context in (1 << 17, 1 << 20)
            ]
            assert cell == "{} / {}".format(*counts)
    rows = [line for line in lines if line[0] in MODELS and line[1].endswith(" B")]
    assert len(rows) == 2
    for name, latents, keys, hot, resident, hosted in rows:
        found = capacity(**settings(name, host_gib=100))
        assert latents == f"{found.host_bytes_per_token:,} B"
        assert keys == f"{found.bytes_per_token:,.0f} B"
        assert hot == f"{found.hot_bytes / 1e6:.0f} MB"
        on_gpu = found.bytes_per_token * 131072
        on_host = found.host_bytes_per_token * 131072
        assert resident == f"{(on_gpu + on_host) / 1e9:.2f} GB"
        on_gpu += found.hot_bytes
        assert hosted == f"{on_gpu / 1e9:.2f} GB and {on_host / 1e9:.2f} GB on the host"
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"):
        assert f"{capacity(**settings(name)).bytes_per_token:,.0f} B" in page


def test_the_page_about_long_contexts_has_the_predictions():
    import long_contexts

    page = (DOCS / "long-contexts-evidence.md").read_text(encoding="utf-8").splitlines()
    tables = {"prediction": long_contexts.rows(), "ratios": long_contexts.ratios()}
    for name, lines in tables.items():
        begin, end = (page.index(f"<!-- {name}: {word} -->") for word in ("begin", "end"))
        assert page[begin + 3 : end] == lines
    alone, many = long_contexts.predict(1), long_contexts.predict(8)
    assert (many.requests, many.wall) == (35, "GPU memory")  # as in the table of what fits
    assert long_contexts.predict(8, host_gib=560).wall == "host memory"
    assert alone.indexer_ms == pytest.approx(61 * 4 * (132 << 20) / 4.0e12 * 1e3)
    assert alone.link_ms == pytest.approx(61 * (32 + 4 * 2048 * 0.417 * 656 / 40e3) / 1e3)
    assert alone.exchange_ms == 0
    parts = many.indexer_ms, many.attention_ms, many.link_ms, many.exchange_ms
    assert many.step_ms == sum(parts)
    ratio = long_contexts.predict_ratio(4, 16)
    assert ratio.slow_us == pytest.approx(25 + 16 * 2048 * 0.47 / 4 * 656 / 42e3)
    assert ratio.fast_us == pytest.approx(25 + 16 * 2048 * 0.054 * 656 / 50e3)
    projections, sent = 128 * (1536 * 192 + 128 * 512) * 2 / 4.0e6, 16 * 0.75 / 387e3
    gather = 30 + sent * 128 * 576 * 2
    hidden = projections / 4 + gather  # less than the 10 us of one GPU
    attention = 15 + (75 - projections - 15) / 4
    resident = hidden + attention + 30 + sent * 128 * 512 * 2
    assert ratio.resident_us == pytest.approx(resident)
    assert ratio.slow == pytest.approx(1 + (ratio.slow_us - hidden) / resident)
    assert long_contexts.predict_ratio(4, 1).slow == 1  # hidden


def test_weights_that_do_not_fit():
    found = capacity(**settings("DeepSeek-V3.2", gpus=1))
    assert (found.free_bytes, found.requests, found.tokens) == (0, 0, 0)


def cases():
    """Settings of each model, format and share."""
    sizes = itertools.cycle([(8, 140), (1, 192), (3, 80)])
    for name, share in itertools.product(MODELS, SHARES):
        model = MODELS[name]
        for cache, index in itertools.product(model.cache, model.index):
            gpus, memory = next(sizes)
            names = {"cache_format": cache.name, "index_format": index.name}
            chosen = {"share": share, "gpus": gpus, "memory_gib": memory, "context": 1000 * gpus}
            yield settings(name, **names, **chosen, host_gib=0, rows_per_seat=4096)
            if name in ON_HOST:
                for host_gib in (50, 1000, 9000.5):
                    yield settings(name, **names, **chosen, host_gib=host_gib, rows_per_seat=2048)


def test_the_script_computes_the_same():
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    given = [*cases()]
    code = (
        f"const {{capacity}} = require({json.dumps(str(DOCS / 'capacity.js'))});"
        "const {tables, given} = JSON.parse(require('fs').readFileSync(0));"
        "console.log(JSON.stringify(given.map((each) => capacity(tables, each))));"
    )
    text = json.dumps({"tables": tables(), "given": given})
    ran = subprocess.run([node, "-e", code], input=text, capture_output=True, text=True, check=True)
    for chosen, found in zip(given, json.loads(ran.stdout), strict=True):
        rows = found.pop("rows")
        assert found == dataclasses.asdict(capacity(**chosen))
        assert sum(row["read_bytes"] for row in rows) == found["step_bytes"]
        per_token = found["bytes_per_token"] + found["host_bytes_per_token"]
        assert sum(row["token_bytes"] for row in rows) == per_token
        assert sum(row["request_bytes"] for row in rows) == found["bytes_per_request"]


def test_ids_of_the_page_are_not_those_of_its_headings():
    text = (DOCS / "capacity.md").read_text(encoding="utf-8")
    headings = {line.lower().replace(" ", "-") for line in re.findall(r"^#+ (.+)$", text, re.M)}
    script = (DOCS / "capacity.js").read_text(encoding="utf-8")
    (root,) = re.findall(r'calculator\(document.getElementById\("(.+)"\)', script)
    assert re.findall(r'id="(.+?)"', text) == [root]
    assert root not in headings


def test_the_page_in_a_browser(tmp_path):
    """It shows the results of the settings in its address."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs Chromium")
    text = (DOCS / "capacity.md").read_text(encoding="utf-8")
    text = runpy.run_path(str(DOCS / "tables.py"))["with_tables"](text)
    (tmp_path / "capacity.js").write_bytes((DOCS / "capacity.js").read_bytes())
    page = tmp_path / "capacity/index.html"
    page.parent.mkdir()
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{text}", encoding="utf-8")
    chosen = settings("GLM-5.2", gpus=16, memory_gib=96, share="data")
    # The GPU and the model bring their memory and weights.
    given = {name: value for name, value in chosen.items() if not name.endswith("_gib")}
    parts = "&".join(f"{name}={value}" for name, value in given.items())
    address = f"{page.as_uri()}#gpu=RTX PRO 6000&{parts}".replace("131072", "17")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    ran = subprocess.run(
        [browser, *flags, profile, address], capture_output=True, text=True, check=True, timeout=120
    )
    shown = re.search(r'id="capacity-results".*?</div>', ran.stdout, re.DOTALL)[0]
    lines = re.findall(r"<tr>(.*?)</tr>", shown)
    cells = [
        [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line)] for line in lines
    ]
    found = capacity(**chosen)
    assert cells[0] == ["requests of 128K tokens that fit at a time", f"{found.requests:,}"]
    assert cells[1] == ["most tokens of a single request", f"{found.tokens:,}"]
    floor = found.gpu_step_bytes / GPUS["RTX PRO 6000"][1] / 1e9
    assert cells[7][0] == "at least, at 1.79 TB/s"
    assert float(cells[7][1].removesuffix(" ms")) == pytest.approx(floor, rel=0.01)
    names = [row.name for row in MODELS["GLM-5.2"].rows]
    assert [line[0] for line in cells[-len(names) :]] == names
