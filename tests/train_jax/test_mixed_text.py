"""Several text data sets in one run, weights of their tokens, and the loss with weights and a divisor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.presets import with_fields
from support.text_sets import sums, text_set, text_set_of

from train_jax.__main__ import main
from train_jax.core.gradients import compute_gradients
from train_jax.errors import UserError
from train_jax.language.batches import (
    BLOCK_ROWS,
    BestFit,
    MixedRows,
    ShuffledRows,
    StreamRows,
    _block,
    eval_batches,
)
from train_jax.language.task import LanguageConfig, LanguageTask
from train_jax.language.text_building import write_documents
from train_jax.language.text_set import TextSet, TokenStream, _check_hashes, shard_name
from train_jax.language.tokenizer import Tokenizer
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start

SEQ_LEN = 24
PACKINGS = {"stream": StreamRows, "shuffled": ShuffledRows, "bestfit": BestFit, "bestfit-pad": BestFit}


# ---- rows of several data sets


@pytest.fixture
def streams(tmp_path):
    """Three streams; the token at a position is the position, after 1 000 for each stream before."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        np.save(tmp_path / str(number) / shard_name(0), np.arange(1000, dtype="<u2") + 1000 * number)
    return [TokenStream(tmp_path / str(number), (1000,), 3000) for number in range(3)]


def mixed(streams, weights, seed=0):
    return MixedRows([StreamRows(stream, 9, 4) for stream in streams], weights, seed)


def sources_of(batch):
    return batch["inputs"][:, 0] // 1000


def test_every_data_set_has_its_exact_share_of_a_block(streams):
    rows = mixed(streams, [3, 1, 0.5])
    order = [sources_of(rows.at(range(n * BLOCK_ROWS, (n + 1) * BLOCK_ROWS))) for n in range(3)]
    assert {tuple(np.bincount(each)) for each in order} == {(683, 227, 114)}
    assert (order[0] != order[1]).any() and (order[0] != np.sort(order[0])).any()
    assert (sources_of(mixed(streams, [3, 1, 0.5], seed=1).at(range(BLOCK_ROWS))) != order[0]).any()
    assert rows.rows_per_epoch == sum(StreamRows(stream, 9, 4).rows_per_epoch for stream in streams)


def test_each_data_set_gives_its_own_rows_in_their_order(streams):
    """The rows cross the ends of blocks and of the data."""
    parts = [mixed(streams, [3, 1, 1]).at(range(*ends)) for ends in ((0, 1500), (1500, 3 * BLOCK_ROWS))]
    batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for number, stream in enumerate(streams):
        own = sources_of(batch) == number
        alone = StreamRows(stream, 9, 4).at(range(own.sum()))
        for name, values in alone.items():
            np.testing.assert_array_equal(batch[name][own], values)


# ---- data sets with weights


def conversations(tokenizer, seed):
    rng = np.random.default_rng(seed)
    texts = [" ".join(map(str, rng.integers(100, size=size))) for size in rng.integers(1, 14, 40)]
    encoded = tokenizer.encode_batch(texts)
    return [([tokenizer.bos, *ids], [0, *rng.integers(0, 2, len(ids))]) for ids in encoded]


def write(folder, tokenizer, seed=0, **options):
    documents = conversations(tokenizer, seed)
    write_documents(folder, tokenizer, {"seed": seed}, {"train": documents[:30], "test": documents[30:]}, **options)
    return TextSet(folder)


@pytest.fixture(scope="module")
def text(made_once):
    """A folder with the data sets `plain`, `other` (the same tokenizer), `stranger` (another one) and `weighted`."""

    def make(folder):
        plain = text_set(folder, sums(60, 10), "plain")
        text_set_of(folder, "other", tokenizer=str(plain), seed=1)
        text_set_of(folder, "stranger", vocab_size=300)
        write(folder / "weighted", Tokenizer.load(folder / "plain"))

    return made_once("mixed text", make)


def config_of(text, *names, fields=None, **task_config):
    sizes = {"seq_len": SEQ_LEN, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "global_batch_size": 8}
    base = dataclasses.replace(preset("chat-tiny"), data_dir=",".join(str(text / name) for name in names))
    return with_fields(dataclasses.replace(base, task_config=LanguageConfig(**task_config)), sizes | (fields or {}))


def test_documents_and_weights_come_back(text, tmp_path):
    tokenizer = Tokenizer.load(text / "plain")
    expected = conversations(tokenizer, 0)[:30]
    small = write(tmp_path / "small", tokenizer, shard_tokens=50)
    data = TextSet(text / "weighted")
    tokens = np.load(shard := tmp_path / "small" / "train" / shard_name(1))
    before = small.fingerprint
    np.save(shard, tokens[::-1])
    assert TextSet(tmp_path / "small").fingerprint != before and TextSet(tmp_path / "small").changed
    np.save(shard, tokens)
    assert small.fingerprint == data.fingerprint and not small.changed and len(small.splits["train"].shards) > 3
    for each in (data, small):
        stream = each.stream("train")
        for values, column in ((stream, 0), (stream.weights, 1)):
            stored = values.take(0, len(stream))
            np.testing.assert_array_equal(stored, np.concatenate([document[column] for document in expected]))
    record = data.splits["train"]
    texts = list(data.documents("train"))
    assert (record.documents, record.bytes) == (30, sum(len(text.encode()) for text in texts))
    assert write(tmp_path / "second", tokenizer, seed=1).fingerprint != data.fingerprint
    assert TextSet(text / "plain").stream("train").weights is None


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([281, 5, 6], [0, 1], "begins with <|bos|>, which occurs once, and as many weights"),
        ([281, 5, 281], [0, 1, 1], "begins with"),
        ([281, 5], [0, 2], "the weights 0 and 1"),
    ],
)
def test_documents_that_no_packing_could_read_are_refused(text, tmp_path, ids, mask, message):
    tokenizer = Tokenizer.load(text / "plain")  # <|bos|> is 281
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        write_documents(tmp_path, tokenizer, {}, {"train": [(ids, mask)], "test": []})


def test_damaged_weights_are_one_line(text, tmp_path):
    data = write(tmp_path / "set", Tokenizer.load(text / "plain"))
    _check_hashes(data.folder)
    path = data.folder / "train" / shard_name(0, "weights")
    size = data.splits["train"].tokens
    np.save(path, np.full(size, 7, "u1"))
    with pytest.raises(UserError, match="contains the weight 7, expected less than 2"):
        data.stream("train").weights.take(0, 5)
    np.save(path, np.zeros(size, "u1"))
    with pytest.raises(UserError, match=r"the train split is not what recipe\.json says"):
        _check_hashes(data.folder)


def test_a_token_of_weight_0_is_no_target_in_any_packing(text):
    data = TextSet(text / "weighted")
    stream = data.stream("train")
    bos = data.tokenizer().bos
    plain = TokenStream(data.folder / "train", data.splits["train"].shards, data.vocab_size)
    for make in (
        lambda stream: StreamRows(stream, SEQ_LEN, 4),
        lambda stream: ShuffledRows(stream, SEQ_LEN, 0),
        lambda stream: BestFit(stream, bos, SEQ_LEN),
        lambda stream: BestFit(stream, bos, SEQ_LEN, pads=True),
    ):
        masked, whole = (make(each).at(range(30)) for each in (stream, plain))
        np.testing.assert_array_equal(masked["inputs"], whole["inputs"])
        ignored = masked["targets"] == -1
        np.testing.assert_array_equal(masked["targets"][~ignored], whole["targets"][~ignored])
        assert 0.3 < ignored.mean() < 0.9
    tokens, weights = (each.take(0, len(stream)) for each in (stream, stream.weights))
    (batch,) = eval_batches(stream, rows=1000, seq_len=SEQ_LEN, limit=0, shard=(0, 1))
    targets = batch["targets"].ravel()[: len(stream) - 1]
    np.testing.assert_array_equal(targets, np.where(weights == 0, -1, tokens)[1:])


# ---- the task


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_takes_the_rows_of_each_data_set_from_its_own_packing(text, packing):
    names = ("plain", "other", "weighted")
    task = LanguageTask(config_of(text, *names, packing=packing, data_weights="2,1,1"))
    each = [LanguageTask(config_of(text, name, packing=packing)) for name in names]
    batch = task.batch(0, (0, 1))
    order = _block((512, 256, 256), task.config.seed, 0)[:8]
    assert set(order) == {0, 1, 2}
    for number, alone in enumerate(each):
        rows = alone.rows if packing != "shuffled" else ShuffledRows(alone.rows.stream, SEQ_LEN, number * 2**32)
        for name, values in rows.at(range((order == number).sum())).items():
            np.testing.assert_array_equal(batch[name][order == number], values)
    assert task.examples_per_epoch == sum(alone.examples_per_epoch for alone in each)
    assert task.fingerprint not in {alone.fingerprint for alone in each}
    assert task.test_stream.take(0, 9).tolist() == each[0].test_stream.take(0, 9).tolist()
    assert {type(alone.rows) for alone in each} == {PACKINGS[packing]}
    assert (task.rows.cut_documents > 0) == (packing == "bestfit-pad")


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (("plain", "stranger"), "", r"stranger was built with another tokenizer than .*plain; build it with `trm"),
        (("plain", "other"), "1", "'1': expected 2 numbers above 0, one for each data set in --data-dir; use 1,1"),
        (("plain", "other"), "1,1e-9", "1,024 rows have none of the data set of weight 1e-09"),
    ],
)
def test_data_sets_that_cannot_be_mixed_are_one_line(text, names, weights, message):
    with pytest.raises(UserError, match=message) as raised:
        start(config_of(text, *names, data_weights=weights), devices=Devices(1))
    assert len(str(raised.value).splitlines()) == 1


def test_a_data_set_of_a_mixture_has_its_share(text):
    """Without weights, a pass over each data set takes the same number of steps."""
    config = config_of(text, "plain", "weighted", fields={"global_batch_size": 512})
    task = LanguageTask(config)
    task.check(config, Devices(1))
    sizes = [LanguageTask(config_of(text, name)).examples_per_epoch for name in ("plain", "weighted")]
    assert task.rows._counts[0] == round(BLOCK_ROWS * sizes[0] / sum(sizes))


# ---- the loss


class Weighted(LanguageTask):
    """Batches with weights and a divisor, as of a training by rewards; those of step 1 are all 0."""

    def batch(self, step, shard, state=None):
        batch = super().batch(step, shard)
        rng = np.random.default_rng(step)
        weights = rng.normal(size=batch["targets"].shape) * rng.integers(0, 2, batch["targets"].shape)
        weights[:4] = 0  # half of the parts and devices have no weight
        divisor = rng.random(len(weights)) + 1
        return batch | {"weights": np.float32(weights * (step != 1)), "divisor": np.float32(divisor)}


@pytest.fixture(scope="module")
def weighted_run(text):
    fields = {"n_layer": 1, "groups": (), "optimizer": "adamw", "ema_decay": 0.9, "warmup_steps": 4}
    config = config_of(text, "plain", "weighted", packing="bestfit-pad", fields=fields)
    return start(config, Weighted(config), Devices(1))


def test_the_loss_is_the_weighted_sum_over_the_divisor(weighted_run):
    """The reference is the module's losses, one by one; a part may have no target."""
    training = weighted_run
    batch = training.task.batch(0, (0, 1))
    objective = training.objective
    state = training.initial_state()
    weights = np.where(batch["targets"] == -1, 0, batch["weights"])

    def expected(params):
        call = objective.call(params, state.buffers, train=True)
        losses, _ = call(batch["inputs"], batch["targets"], loss_reduction="none")
        return jnp.vdot(losses.reshape(weights.shape), weights)

    @jax.jit
    def gradients_of(params):
        options = {"scale": 1.0, "global_batch_size": 8, "parts": 2}
        arrays = jax.tree.map(jnp.asarray, batch)
        return compute_gradients(objective, state, params, (), arrays, lambda *_: None, **options)

    ours, (value, gradients) = gradients_of(state.params), jax.jit(jax.value_and_grad(expected))(state.params)
    np.testing.assert_allclose(ours.loss, value, rtol=1e-5)
    np.testing.assert_allclose(ours.weight, batch["divisor"].sum(), rtol=1e-6)
    assert ours.counted == ours.metrics["tokens"] == (weights != 0).sum()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(ours.dense[name], gradient, rtol=0, atol=1e-5, err_msg=name)


def test_a_step_without_targets_changes_no_bit_and_is_counted(weighted_run):
    """The state and the next step are as if the step had not been."""
    devices = Devices(1)
    step = weighted_run.parallel_step()
    key = devices.random_key(0)

    def run(numbers):
        state = devices.replicate(weighted_run.initial_state())
        carry = devices.shard(())
        states = []
        logged = []
        for number in numbers:
            state, carry, metrics = step(state, carry, weighted_run.batches.at(number), key)
            states.append(jax.tree.map(np.array, state))
            logged.append(devices.to_host(metrics))
        return states, logged

    (first, empty, last), logged = run([0, 1, 2])
    jax.tree.map(np.testing.assert_array_equal, empty, first)
    jax.tree.map(np.testing.assert_array_equal, last, run([0, 2])[0][1])
    assert [bool(each["empty_steps"]) for each in logged] == [False, True, False]
    assert not any(each["skipped_steps"] or each["consecutive_skipped"] for each in logged)
    assert np.any(last.params["lm_head.weight"] != first.params["lm_head.weight"])
    assert int(last.step.reshape(-1)[0]) == 2 and not np.any(last.guard.skipped_steps)


@pytest.mark.campaign
def test_a_run_on_two_data_sets_by_command(text, tmp_path, capsys):
    run = str(tmp_path / "run")
    names = ",".join(str(text / name) for name in ("plain", "weighted"))
    small = "--arch.seq-len 24 --arch.n-layer 2 --arch.n-embd 32 --global-batch-size 8 --steps 3 --wandb disabled"
    command = ["train", "chat-tiny", "--data-dir", names, "--run-dir", run, "--packing", "bestfit-pad", *small.split()]
    assert main([*command, "--data-weights", "3,1"]) == 0
    assert "documents in 2 data sets" in capsys.readouterr().out
    assert main(["generate", run, "--prompt", "1 + 1", "--max-tokens", "2"]) == 0
    assert main(["evaluate", run, "--data-dir", str(text / "stranger"), "--no-samples"]) == 2
    assert "another tokenizer than" in capsys.readouterr().err
