#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention on the shapes of a `wgpu-attention bench --save` file.

  torch_sdpa.py BENCH.json OUT.json [--device cuda] [--seconds 60]   times each attention and decode shape in f32, f16, bf16
  torch_sdpa.py --table BENCH.json [OUT.json]                        prints both beside each other (no torch needed)

Operations are counted as there: a multiply-add is two, causal work once. Times are by events of the device (cuda, ROCm), or by
the wall clock for the device `cpu`. A shape that torch refuses is kept with the reason.
"""

import argparse
import itertools
import json
import statistics
import sys
import time

TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def read(path, schema):
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    if not isinstance(report, dict):
        sys.exit(f"{path}: expected an object")
    if report.get("schema") != schema:
        sys.exit(f"{path}: expected schema {schema}, got {report.get('schema')!r}")
    return report


def read_bench(path):
    """The first run of a file of results, as complete as the file."""
    report = read(path, 2)
    if not report.get("runs"):
        sys.exit(f"{path}: it has no run")
    return dict(report["runs"][0], complete=report["complete"])


def sizes_of(case):
    return dict(case["sizes"], causal=case["causal"])


def shapes(report):
    """Each attention shape once, whatever type and layout it is measured in: sizes, operations, sets of operands."""
    seen = {}
    for case in report["cases"]:
        if case["kind"] in ("attention", "decode"):
            sizes = sizes_of(case)
            # As many sets in turn as there, so that neither is flattered by a cache.
            sets = case.get("operand_sets", 1)
            seen.setdefault(json.dumps(sizes, sort_keys=True), (sizes, case["flops"], sets))
    return list(seen.values())


def time_one(torch, device, sizes, element, sets):
    """Median seconds of a call, and how many samples it is the median of."""
    function = torch.nn.functional.scaled_dot_product_attention
    dtype = getattr(torch, TYPES[element])

    def tensor(heads, tokens):
        shape = (sizes["batch"], heads, tokens, sizes["head_dim"])
        return torch.rand(shape, device=device, dtype=torch.float32).mul_(2).sub_(1).to(dtype)

    def operands():
        kv = [tensor(sizes["kv_heads"], sizes["kv_len"]) for _ in range(2)]
        return [tensor(sizes["heads"], sizes["q_len"]), *kv]

    turns = itertools.cycle([operands() for _ in range(sets)])
    # One query that sees all keys needs no mask; torch's own aligns it with the first key.
    options = {"is_causal": bool(sizes["causal"]) and sizes["q_len"] == sizes["kv_len"]}
    if sizes["heads"] != sizes["kv_heads"]:
        options["enable_gqa"] = True

    def call():
        return function(*next(turns), **options)

    def sample(calls):
        if device == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3 / calls

    for _ in range(3):
        seconds = sample(1)
    calls = max(1, min(256, int(0.01 / max(seconds, 1e-6))))
    sample(calls)
    samples = []
    begin = time.perf_counter()
    while len(samples) < 15 and (len(samples) < 3 or time.perf_counter() - begin < 0.5):
        samples.append(sample(calls))
    return statistics.median(samples), len(samples)


def measure(arguments):
    import torch

    report = read_bench(arguments.bench)
    device = arguments.device
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    out = {
        "schema": 1,
        "what": "torch scaled_dot_product_attention",
        "torch": torch.__version__,
        "device": name,
        "complete": True,
        "cases": [],
    }
    # Full f32, as the kernels here: no shortened products.
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.perf_counter()
    for sizes, flops, sets in shapes(report):
        for element in TYPES:
            if time.perf_counter() - begin > arguments.seconds:
                out["complete"] = False
                break
            entry = {"sizes": sizes, "type": element, "flops": flops}
            try:
                with torch.no_grad():
                    seconds, samples = time_one(torch, device, sizes, element, sets)
                entry.update(median_s=seconds, samples=samples, flops_per_second=flops / seconds)
            except (RuntimeError, TypeError, ValueError) as error:
                entry["refused"] = str(error).splitlines()[0]
            out["cases"].append(entry)
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(out, file, indent=2)
        file.write("\n")


def table(arguments):
    report = read_bench(arguments.bench)
    torch_report = read(arguments.out, 1) if arguments.out else None
    rows = [("case", "type", "this, ms", "GFLOP/s", "torch, ms", "GFLOP/s", "this / torch")]
    theirs = {}
    for entry in torch_report["cases"] if torch_report else []:
        theirs[json.dumps(entry["sizes"], sort_keys=True), entry["type"]] = entry
    shown = set()

    def row(name, element, own, other):
        ms = lambda entry: f"{entry * 1e3:.4f}" if entry else "-"
        rate = lambda flops, seconds: f"{flops / seconds / 1e9:.1f}" if seconds else "-"
        own_s = (own.get("gpu") or own.get("wall") or {}).get("median_s") if own else None
        other_s = other.get("median_s") if other else None
        flops = (own or other)["flops"]
        ratio = f"{own_s / other_s:.2f}" if own_s and other_s else "-"
        rows.append((name, element, ms(own_s), rate(flops, own_s), ms(other_s), rate(flops, other_s), ratio))

    for case in report["cases"]:
        key = json.dumps(sizes_of(case), sort_keys=True), case["type"]
        shown.add(key)
        name = f"{case['name']}@{case['variant']}" if case.get("variant") else case["name"]
        row(name, case["type"], case, theirs.get(key))
    names = {}
    for case in report["cases"]:
        names.setdefault(json.dumps(sizes_of(case), sort_keys=True), case["name"].rsplit(f"-{case['type']}", 1)[0])
    for key, entry in theirs.items():
        if key not in shown:
            row(names.get(key[0], key[0]), key[1], None, entry)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for cells in rows:
        first = [cell.ljust(width) for cell, width in zip(cells[:2], widths)]
        rest = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:])]
        print("  ".join(first + rest).rstrip())
    if not report["complete"]:
        print("\nnot all cases: the measurement was ended before")
    if torch_report:
        print(f"\ntorch {torch_report['torch']} on {torch_report['device']}; this on {report['adapter']['name']}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", metavar="BENCH.json")
    parser.add_argument("out", metavar="OUT.json", nargs="?")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments)
    elif arguments.out:
        measure(arguments)
    else:
        parser.error("OUT.json is missing")


if __name__ == "__main__":
    main()
