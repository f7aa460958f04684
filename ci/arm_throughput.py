"""What llvm-mca makes of the inner loops of the NEON tile kernels.

Arguments: llvm-objdump, llvm-mca, the release library. Prints a table; exits with 1 if a core that must reach 90 % of
its FMA peak does not, or if a tile body spills.
"""

import json
import re
import subprocess
import sys

TILES = {"scores": "neon::score::tile", "weighted_sum": "neon::weighted_sum::tile"}
# Out-of-order cores with a bar to clear; the in-order one is reported.
CORES = {"cortex-a53": None, "neoverse-n1": 0.9, "neoverse-v2": 0.9}
ITERATIONS = 1000


def run(*command, stdin=None):
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True).stdout


def functions(objdump, library):
    """Instructions of each tile: (address, text, branch target or None)."""
    bodies, body = {}, None
    for line in run(objdump, "-d", "--demangle", "--no-show-raw-insn", library).splitlines():
        if head := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            found = [op for op, name in TILES.items() if re.search(rf"{name}(::h[0-9a-f]+)?$", head[1])]
            body = bodies.setdefault(found[0], []) if found else None
        elif body is not None and (insn := re.match(r"\s*([0-9a-f]+):\s+(\S.*)", line)):
            text = re.sub(r"\s*//.*", "", insn[2])
            target = re.search(r"0x([0-9a-f]+) <", text)
            body.append((int(insn[1], 16), text, int(target[1], 16) if target else None))
    return bodies


def loops(body):
    """Innermost loops, as lists of instruction texts, the one with the most multiply-adds first."""
    spans = [(to, at) for at, _, to in body if to is not None and to <= at]
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    found = [[(text, to) for at, text, to in body if first <= at <= last] for first, last in inner]
    return sorted(found, key=lambda loop: -sum(is_fma(text) for text, _ in loop))


def is_fma(text):
    return text.startswith("fmla")


def is_no_load(text):
    return not text.startswith("ld")


def on_stack(text):
    return re.match(r"(ld|st)\w*\s.*\[sp", text) is not None


def analyse(mca, core, loop):
    lines = [re.sub(r"0x[0-9a-f]+ <.*", "loop", text) if to is not None else text for text, to in loop]
    source = "\n".join(["loop:", *lines]) + "\n"
    command = [mca, "-mtriple=aarch64", f"-mcpu={core}", f"-iterations={ITERATIONS}", "-json"]
    region = json.loads(run(*command, stdin=source))
    target, region = region["TargetInfo"], region["CodeRegions"][0]
    summary, info = region["SummaryView"], region["InstructionInfoView"]["InstructionList"]
    fmas = [i for i, (text, _) in enumerate(loop) if is_fma(text)]
    peak = 1 / next(i["RThroughput"] for i in info if i["Instruction"] == fmas[0])
    cycles = summary["TotalCycles"] / ITERATIONS
    names = target["Resources"]
    load = dict.fromkeys(names, 0.0)
    for use in region["ResourcePressureView"]["ResourcePressureInfo"]:
        # The row past the last instruction holds the totals of an iteration.
        if use["InstructionIndex"] == len(loop):
            load[names[use["ResourceIndex"]]] += use["ResourceUsage"]
    busiest = max(load, key=load.get)
    slots = summary["uOpsPerCycle"] / summary["DispatchWidth"]
    return cycles / len(fmas), len(fmas) / cycles / peak, peak, (busiest, load[busiest] / cycles), slots


def main():
    objdump, mca, library = sys.argv[1:]
    bodies = functions(objdump, library)
    faults = [f"{op}: no tile body in {library}" for op in TILES if op not in bodies]
    print(f"{'loop':<14}{'core':<13}{'FMAs':>5}{'cycles/FMA':>12}{'peak FMA/cycle':>16}{'of peak':>9}  limits")
    for op, body in bodies.items():
        inner = loops(body)
        if not inner or not any(is_fma(text) for text, _ in inner[0]):
            faults.append(f"{op}: no loop of multiply-adds")
            continue
        # In loops nothing may touch the stack; outside, the callee's registers are saved, but no accumulator.
        spills = sum(on_stack(text) for loop in inner for text, _ in loop)
        spills += sum(on_stack(text) and re.search(r"\bq\d", text) is not None for _, text, _ in body)
        for core, least in CORES.items():
            per_fma, part, peak, (unit, busy), slots = analyse(mca, core, inner[0])
            fmas = sum(is_fma(text) for text, _ in inner[0])
            limits = f"{unit} {busy:.0%} busy, {slots:.0%} of issue slots"
            if least is None:
                # What is not a full unit is waiting. For what, shows in the loop without it.
                alone = [analyse(mca, core, [i for i in inner[0] if keep(i[0])])[1] for keep in (is_no_load, is_fma)]
                limits += "; {:.0%} of peak without loads, {:.0%} without address arithmetic too".format(*alone)
                limits += ": both wait, in order, behind multiply-adds"
            print(f"{op:<14}{core:<13}{fmas:>5}{per_fma:>12.3f}{peak:>16.0f}{part:>9.1%}  {limits}")
            if least is not None and part < least:
                faults.append(f"{op} on {core}: {part:.1%} of the FMA peak, {least:.0%} wanted")
        print(f"{op:<14}{'any':<13}spills in its body, stack accesses in its {len(inner)} loops: {spills}")
        if spills:
            faults.append(f"{op}: {spills} spills or stack accesses in loops")
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


main()
