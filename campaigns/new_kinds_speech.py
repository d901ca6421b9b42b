"""Builders of the models of the work list for speech and for time series."""

# pyright: reportMissingImports=false, reportCallIssue=false
# The packages are in an environment of their own.

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from campaigns.new_kinds_calls import Function, Model, without_init


def ecapa_tdnn() -> Model:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    net = ECAPA_TDNN(
        8, channels=[8, 8, 8], kernel_sizes=[3, 3, 1], dilations=[1, 2, 1], attention_channels=4, lin_neurons=6,
        res2net_scale=2, se_channels=4,
    )  # fmt: skip
    return Model(net, (torch.randn(2, 12, 8), torch.tensor([1.0, 0.5])), {"steps": 1})


def wav2vec_pretraining() -> Model:
    from speechbrain.lobes.models.transformer.Transformer import TransformerEncoder
    from speechbrain.lobes.models.wav2vec import (
        EncoderWrapper,
        W2VLatentExtractor,
        W2VTargetQuantiser,
        sample_negatives,
    )
    from speechbrain.nnet.losses import ContrastiveLoss

    class Pretraining(nn.Module):
        def __init__(self):
            super().__init__()
            self.extractor = W2VLatentExtractor([8, 8], [5, 3], [4, 2])
            encoder = TransformerEncoder(num_layers=1, nhead=2, d_ffn=16, d_model=16)
            self.encoder = EncoderWrapper(8, 16, encoder)
            self.quantiser = W2VTargetQuantiser(8, 16, num_vars=4)
            self.loss = ContrastiveLoss(0.1)

        def forward(self, wavs, wav_lens, mask):
            latents = self.extractor(wavs)
            out = self.encoder(latents, wav_lens=wav_lens, mask=mask)
            count = len(wavs)
            embeddings = out["embeddings"][mask].view(count, -1, 16)
            targets, meta = self.quantiser(latents[mask].view(count, -1, 8))
            negatives = sample_negatives(targets, 3)
            loss, accuracy = self.loss(embeddings, targets, negatives)
            return loss + meta["diversity_loss"], accuracy

    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 1:4] = True
    mask[1, 2:5] = True
    return Model(Pretraining(), (torch.randn(2, 66), torch.tensor([1.0, 0.8]), mask), {"train": True, "steps": 1})


def conformer_encoder() -> Model:
    from espnet2.asr.encoder.conformer_encoder import ConformerEncoder

    net = ConformerEncoder(
        20, output_size=16, attention_heads=2, linear_units=16, num_blocks=2, cnn_module_kernel=3, use_flash_attn=False,
        pos_enc_layer_type="rel_pos", selfattention_layer_type="rel_selfattn", rel_pos_type="latest",
        stochastic_depth_rate=0.3,
    )  # fmt: skip
    return Model(net, (torch.randn(2, 24, 20), torch.tensor([24, 17])), {"train": True, "steps": 1})


def fastspeech2() -> Model:
    from espnet2.tts.fastspeech2 import FastSpeech2

    net = FastSpeech2(
        12, 8, adim=16, aheads=2, elayers=1, eunits=16, dlayers=1, dunits=16, postnet_layers=1, postnet_chans=8,
        duration_predictor_chans=8, energy_predictor_chans=8, pitch_predictor_chans=8,
    )  # fmt: skip
    durations = torch.tensor([[2, 1, 3, 1], [1, 2, 1, 0]])
    args = (
        torch.randint(1, 11, (2, 3)), torch.tensor([3, 2]), torch.randn(2, 7, 8), torch.tensor([7, 4]),
        durations, torch.tensor([4, 3]), torch.randn(2, 4, 1), torch.tensor([4, 3]), torch.randn(2, 4, 1),
        torch.tensor([4, 3]),
    )  # fmt: skip
    return Model(net, args, {"train": True, "steps": 1})


def emformer() -> Model:
    from torchaudio.models import Emformer

    net = Emformer(8, 2, 16, 2, segment_length=4, left_context_length=4, right_context_length=2, max_memory_size=2)
    return Model(net, (torch.randn(2, 14, 8), torch.tensor([12, 9])))


def _rnnt_loss(
    logits: torch.Tensor, targets: torch.Tensor, logit_lengths: torch.Tensor, target_lengths: torch.Tensor
) -> torch.Tensor:
    """The transducer's loss by its forward recursion, as torchaudio's operator has it; blank is the last class."""
    scores = logits.log_softmax(-1)
    blank = scores[..., -1]
    emit = scores[:, :, :-1].gather(-1, targets[:, None, :, None].expand(-1, scores.shape[1], -1, 1)).squeeze(-1)
    rows = []
    for t in range(scores.shape[1]):
        row = [rows[-1][:, 0] + blank[:, t - 1, 0] if t else blank.new_zeros(len(blank))]
        for u in range(1, scores.shape[2]):
            down = row[-1] + emit[:, t, u - 1]
            row.append(torch.logaddexp(down, rows[-1][:, u] + blank[:, t - 1, u]) if t else down)
        rows.append(torch.stack(row, 1))
    table = torch.stack(rows, 1) + blank
    return -table[torch.arange(len(table)), logit_lengths - 1, target_lengths].mean()


def rnnt() -> Model:
    from torchaudio.models.rnnt import emformer_rnnt_model

    net = emformer_rnnt_model(
        input_dim=8, encoding_dim=16, num_symbols=10, segment_length=8, right_context_length=4,
        time_reduction_input_dim=8, time_reduction_stride=2, transformer_num_heads=2, transformer_ffn_dim=16,
        transformer_num_layers=1, transformer_dropout=0.0, transformer_activation="gelu",
        transformer_left_context_length=8, transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise", transformer_tanh_on_mem=True, symbol_embedding_dim=8,
        num_lstm_layers=1, lstm_layer_norm=True, lstm_layer_norm_epsilon=1e-3, lstm_dropout=0.0,
    )  # fmt: skip

    def step(net: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor, y_lengths: torch.Tensor) -> Any:
        shifted = F.pad(y, (1, 0))
        logits, lengths, _, _ = net(x, lengths, shifted, y_lengths + 1)
        return _rnnt_loss(logits, y, lengths, y_lengths)

    args = (torch.randn(2, 12, 8), torch.tensor([8, 6]), torch.randint(0, 9, (2, 3)), torch.tensor([3, 2]))
    return Model(Function(net, step), args, {"steps": 1})


def tacotron2() -> Model:
    from torchaudio.models import Tacotron2

    net = Tacotron2(
        n_mels=6, n_symbol=12, symbol_embedding_dim=8, encoder_embedding_dim=8, decoder_rnn_dim=8, decoder_max_step=5,
        attention_rnn_dim=8, attention_hidden_dim=8, attention_location_n_filter=4, attention_location_kernel_size=3,
        prenet_dim=8, postnet_n_convolution=2, postnet_embedding_dim=8, gate_threshold=0.5,
    )  # fmt: skip
    return Model(net.eval(), (torch.randint(1, 12, (2, 5)), torch.tensor([5, 3])), {"method": "infer", "steps": 1})


class BandSplit(nn.Module):
    """Band-split RNN: each band of a spectrum has its layers; recurrent over time and over bands; complex masks."""

    def __init__(self):
        super().__init__()
        self.widths = (3, 5, 9)
        self.reduce = nn.ModuleList(nn.Sequential(nn.GroupNorm(1, 2 * w), nn.Conv1d(2 * w, 8, 1)) for w in self.widths)
        self.over_time = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.over_bands = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.masks = nn.ModuleList(nn.Conv1d(16, 4 * w, 1) for w in self.widths)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(32)
        spectrum = torch.stft(wave, 32, 8, window=window, return_complex=True)
        parts = spectrum.split(self.widths, 1)
        bands = [
            f(torch.view_as_real(p).permute(0, 3, 1, 2).flatten(1, 2)) for f, p in zip(self.reduce, parts, strict=True)
        ]
        x = torch.stack(bands, 1).mT
        batch, count, time, _ = x.shape
        x = self.over_time(x.flatten(0, 1))[0].view(batch, count, time, -1)
        x = self.over_bands(x.transpose(1, 2).flatten(0, 1))[0].view(batch, time, count, -1)
        masked = []
        for i, (f, part) in enumerate(zip(self.masks, parts, strict=True)):
            gated = F.glu(f(x[:, :, i].mT), 1).unflatten(1, (2, -1))
            masked.append(part * torch.complex(gated[:, 0], gated[:, 1]))
        return torch.istft(torch.cat(masked, 1), 32, 8, window=window, length=wave.shape[-1])


def band_split() -> Model:
    return Model(BandSplit(), (torch.randn(2, 96),), {"steps": 1})


def moirai() -> Model:
    from uni2ts.distribution import StudentTOutput
    from uni2ts.model.moirai import MoiraiModule

    net = MoiraiModule(
        StudentTOutput(),
        d_model=64,
        num_layers=1,
        patch_sizes=(8, 16),
        max_seq_len=16,
        attn_dropout_p=0.0,
        dropout_p=0.0,
    )

    def step(net: nn.Module, target: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        distribution = net(target, *rest)
        return -distribution.log_prob(target).mean()

    count = 6
    target = torch.randn(1, count, 16)
    observed = torch.ones(1, count, 16, dtype=torch.bool)
    sample_id = torch.tensor([[1, 1, 1, 2, 2, 2]])
    time_id = torch.tensor([[0, 1, 2, 0, 1, 2]])
    variate_id = torch.zeros(1, count, dtype=torch.long)
    prediction = torch.tensor([[False, False, True] * 2])
    patch_size = torch.tensor([[8, 8, 8, 16, 16, 16]])
    args = (target, observed, sample_id, time_id, variate_id, prediction, patch_size)
    return Model(Function(net, step), args, {"steps": 1})


def n_hits() -> Model:
    without_init("neuralforecast")
    without_init("neuralforecast.models")
    from neuralforecast.losses.pytorch import MAE
    from neuralforecast.models.nhits import NHITS

    net = NHITS(h=4, input_size=8, mlp_units=[[8, 8]] * 3, n_freq_downsample=[2, 2, 1], loss=MAE(), max_steps=1)

    def step(net: Any, y: torch.Tensor, mask: torch.Tensor, target: torch.Tensor, target_mask: torch.Tensor) -> Any:
        batch = {"insample_y": y, "insample_mask": mask, "hist_exog": None, "futr_exog": None, "stat_exog": None}
        return net.loss(y=target, y_hat=net(batch), mask=target_mask)

    args = (torch.randn(3, 8, 1), torch.ones(3, 8), torch.randn(3, 4, 1), (torch.rand(3, 4, 1) > 0.3).float())
    return Model(Function(net, step), args)


def deep_ar() -> Model:
    from gluonts.torch.model.deepar.module import DeepARModel

    net = DeepARModel(
        freq="D", context_length=6, prediction_length=3, num_feat_dynamic_real=1, num_feat_static_real=1,
        num_feat_static_cat=1, cardinality=[3], num_layers=1, hidden_size=8, lags_seq=[1, 2, 4], dropout_rate=0.0,
    )  # fmt: skip
    past = net._past_length
    args = (
        torch.tensor([[0], [2]]), torch.randn(2, 1), torch.randn(2, past, 1), torch.rand(2, past) + 0.5,
        (torch.rand(2, past) > 0.2).float(), torch.randn(2, 3, 1), torch.rand(2, 3), torch.ones(2, 3),
    )  # fmt: skip
    return Model(net, args, {"method": "loss"})


class RevIN(nn.Module):
    """Reversible normalization, whose statistics are attributes between the two calls."""

    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))
        self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.stdev * self.weight + self.bias
        return (x - self.bias) / (self.weight + 1e-10) * self.stdev + self.mean


class PatchTST(nn.Module):
    """A transformer over patches of each variable."""

    def __init__(self):
        super().__init__()
        self.revin = RevIN(3)
        self.patch = nn.Linear(4, 16)
        self.place = nn.Parameter(torch.randn(7, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(7 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.revin(x, "norm").mT
        x = F.pad(x, (0, 2), "replicate").unfold(-1, 4, 2)
        x = self.encoder((self.patch(x) + self.place).flatten(0, 1))
        return self.revin(self.head(x.flatten(1)).view(-1, 3, 4).mT, "denorm")


def patch_tst() -> Model:
    return Model(PatchTST(), (torch.randn(2, 14, 3),))


SPEECH = {
    "ECAPA-TDNN": ecapa_tdnn,
    "Wav2vec pretraining": wav2vec_pretraining,
    "Conformer encoder": conformer_encoder,
    "FastSpeech 2": fastspeech2,
    "Emformer": emformer,
    "RNN-T loss model": rnnt,
    "Tacotron 2": tacotron2,
    "Band-split RNN": band_split,
    "Moirai": moirai,
    "N-HiTS": n_hits,
    "DeepAR": deep_ar,
    "PatchTST with RevIN": patch_tst,
}
"""Name in the list -> the function that builds it."""
