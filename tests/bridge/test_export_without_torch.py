"""A program with a symbolic batch, serialised here, runs where neither PyTorch nor the bridge can be imported."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from jax import export
from torch import nn

import bridge

pytestmark = pytest.mark.slow
SIZES = (1, 7, 64)
ELSEWHERE = """
import sys
sys.modules |= dict.fromkeys(("torch", "torchax", "bridge", "models_torch", "train_jax"))  # an import of them raises
import numpy as np
from jax import export

folder = sys.argv[1]
state = [{k: v for k, v in np.load(f"{folder}/{kind}.npz").items()} for kind in ("params", "buffers")]
program = export.deserialize(bytearray(open(f"{folder}/program", "rb").read()))
for size in (1, 7, 64):
    inputs = np.load(f"{folder}/inputs.npy")[:size]
    np.save(f"{folder}/outputs{size}.npy", program.call(*state, inputs))
assert not [name for name, module in sys.modules.items() if name.startswith("torch") and module]
"""


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.group(self.norm(self.conv(x)).relu()), 2)
        return self.head(nn.functional.interpolate(x, scale_factor=2).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.memory = nn.LSTM(16, 8, batch_first=True)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x, _ = self.memory(self.block(self.embed(ids), src_mask=mask, is_causal=True))
        values, places = x.sort(-1)
        return values.cumsum(-1) + places


INPUTS = {
    Images: np.random.default_rng(0).normal(size=(64, 3, 16, 16)).astype(np.float32),
    Tokens: np.random.default_rng(1).integers(0, 50, (64, 9)).astype(np.int32),
}


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
def test_a_symbolic_batch(tmp_path, kind):
    torch.manual_seed(0)
    module = kind().eval()
    inputs = INPUTS[kind]
    fn = bridge.export(module)

    def row(params, buffers, x):
        return fn(params, buffers, x[None], train=False)[0][0]

    program = jax.jit(jax.vmap(row, in_axes=(None, None, 0)))
    shape = export.symbolic_shape(f"batch, {', '.join(map(str, inputs.shape[1:]))}")
    exported = export.export(program, platforms=("cpu", "cuda", "tpu"))(
        fn.params, fn.buffers, jax.ShapeDtypeStruct(shape, inputs.dtype)
    )
    (tmp_path / "program").write_bytes(exported.serialize())
    for name, arrays in (("params", fn.params), ("buffers", fn.buffers)):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    np.save(tmp_path / "inputs.npy", inputs)
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(tmp_path)], check=True)
    for size in SIZES:
        with torch.no_grad():
            expected = module(torch.from_numpy(inputs[:size]))
        np.testing.assert_allclose(np.load(tmp_path / f"outputs{size}.npy"), expected, atol=1e-5)
