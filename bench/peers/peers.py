"""Other libraries on the calls that `rotile-bench peers` names: RoPE (half style) on Q and K, then causal attention, batch 1,
f32, one thread. Reads JSON lines, answers each with one; a library that is not installed is left out.

    pip install -r requirements.txt
"""

import json
import os
import sys
import time

# Before any library starts its threads.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402

BASE = 500_000.0


def operands(case):
    """Q, K, V as [1, heads, tokens, dim] and the cos and sin of Q's positions, each [tokens, dim / 2]."""
    rng = np.random.default_rng(1)
    tokens, dim = case["tokens"], case["head_dim"]
    q_len = 1 if case["step"] == "decode" else tokens
    draw = lambda heads, n: rng.standard_normal((1, heads, n, dim), dtype=np.float32)
    q, k, v = draw(case["heads_q"], q_len), draw(case["heads_kv"], tokens), draw(case["heads_kv"], tokens)
    positions = np.arange(tokens - q_len, tokens)[:, None]
    angles = positions * BASE ** (-2.0 * np.arange(dim // 2) / dim)
    return q, k, v, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Torch:
    def __init__(self):
        import torch

        torch.set_num_threads(1)
        self.torch, self.name = torch, f"PyTorch {torch.__version__}"

    def prepare(self, case):
        torch, decode = self.torch, case["step"] == "decode"
        q, k, v, cos, sin = (torch.from_numpy(x) for x in operands(case))
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        attend = torch.nn.functional.scaled_dot_product_attention
        group = case["heads_q"] != case["heads_kv"]

        def rope(x):
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat((-high, low), -1) * sin

        def run():
            with torch.inference_mode():
                # Cached keys have been rotated before.
                keys = k if decode else rope(k)
                attend(rope(q), keys, v, is_causal=not decode, enable_gqa=group)

        return run


class OnnxRuntime:
    def __init__(self):
        import onnx
        import onnxruntime

        self.onnx, self.ort = onnx, onnxruntime
        self.name = f"ONNX Runtime {onnxruntime.__version__} (GroupQueryAttention)"

    def prepare(self, case):
        onnx, decode = self.onnx, case["step"] == "decode"
        q, k, v, _, _ = operands(case)
        heads_q, heads_kv, dim, tokens = case["heads_q"], case["heads_kv"], case["head_dim"], case["tokens"]
        new = q.shape[2]
        angles = np.arange(tokens)[:, None] * BASE ** (-2.0 * np.arange(dim // 2) / dim)
        pack = lambda x: np.ascontiguousarray(x[:, :, :new].transpose(0, 2, 1, 3).reshape(1, new, -1))
        feeds = {
            "query": pack(q),
            "key": pack(k),
            "value": pack(v),
            # Past and present share one buffer of all tokens, or each step would copy the cache.
            "past_key": k if decode else k[:, :, :0],
            "past_value": v if decode else v[:, :, :0],
            "seqlens_k": np.array([tokens - 1], dtype=np.int32),
            "total": np.array(tokens, dtype=np.int32),
            "cos": np.cos(angles).astype(np.float32),
            "sin": np.sin(angles).astype(np.float32),
        }
        helper, f32 = onnx.helper, onnx.TensorProto.FLOAT
        types = {np.dtype(np.float32): f32, np.dtype(np.int32): onnx.TensorProto.INT32}
        inputs = [helper.make_tensor_value_info(n, types[x.dtype], x.shape) for n, x in feeds.items()]
        cache = (1, heads_kv, tokens, dim)
        outputs = [
            helper.make_tensor_value_info("out", f32, (1, new, heads_q * dim)),
            helper.make_tensor_value_info("present_key", f32, cache),
            helper.make_tensor_value_info("present_value", f32, cache),
        ]
        node = helper.make_node(
            "GroupQueryAttention",
            list(feeds),
            [o.name for o in outputs],
            domain="com.microsoft",
            num_heads=heads_q,
            kv_num_heads=heads_kv,
            do_rotary=1,
        )
        graph = helper.make_graph([node], "attention", inputs, outputs)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = self.ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        place = lambda x: self.ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x))
        values = {name: place(x) for name, x in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for part in ("key", "value"):
            if decode:
                binding.bind_ortvalue_output(f"present_{part}", values[f"past_{part}"])
            else:
                binding.bind_output(f"present_{part}")
        binding.bind_output("out")
        return lambda: session.run_with_iobinding(binding)


class OpenVino:
    def __init__(self):
        import openvino

        self.ov, self.name = openvino, f"OpenVINO {openvino.__version__.split('-')[0]}"

    def prepare(self, case):
        ov, decode = self.ov, case["step"] == "decode"
        import openvino.opset13 as op

        q, k, v, cos, sin = operands(case)
        parameters = [op.parameter(x.shape, np.float32) for x in (q, k, v)]
        half = case["head_dim"] // 2

        def rope(x):
            low, high = op.split(x, op.constant(3), 2).outputs()
            c, s = op.constant(cos), op.constant(sin)
            turned_low = op.subtract(op.multiply(low, c), op.multiply(high, s))
            turned_high = op.add(op.multiply(high, c), op.multiply(low, s))
            return op.concat([turned_low, turned_high], 3)

        def spread(x):
            # Every key head for each query head of its group.
            group = case["heads_q"] // case["heads_kv"]
            if group == 1:
                return x
            _, heads, tokens, dim = (d.get_length() for d in x.get_output_partial_shape(0))
            x = op.reshape(x, op.constant([1, heads, 1, tokens, dim]), False)
            x = op.broadcast(x, op.constant([1, heads, group, tokens, dim]))
            return op.reshape(x, op.constant([1, heads * group, tokens, dim]), False)

        pq, pk, pv = parameters
        keys = pk if decode else rope(pk)
        out = op.scaled_dot_product_attention(rope(pq), spread(keys), spread(pv), causal=not decode)
        model = ov.Model([out], parameters, "attention")
        options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
        for i, x in enumerate((q, k, v)):
            request.set_input_tensor(i, ov.Tensor(x, shared_memory=True))
        return request.infer


def answer(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main():
    cases = json.loads(sys.stdin.readline())["cases"]
    peers, missing = {}, {}
    for kind in (Torch, OnnxRuntime, OpenVino):
        try:
            peers[kind.__name__] = kind()
        except Exception as error:
            missing[kind.__name__] = str(error)
    answer({"peers": [[key, peer.name] for key, peer in peers.items()], "missing": missing})
    prepared = {}
    for line in sys.stdin:
        question = json.loads(line)
        key = (question["peer"], question["case"])
        try:
            if key not in prepared:
                # One case at a time: the caches of all of them would not fit.
                prepared = {other: run for other, run in prepared.items() if other[1] == key[1]}
                prepared[key] = peers[key[0]].prepare(cases[key[1]])
            start = time.perf_counter()
            prepared[key]()
            answer({"seconds": time.perf_counter() - start})
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    main()
