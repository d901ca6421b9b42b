"""Writes an animated GIF of a few flat colours; no library, because nothing else here needs one for pictures.

References: "Graphics Interchange Format, Version 89a", CompuServe, 1990; its appendix F has the compression.
"""

import struct
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

Colour = tuple[int, int, int]
"""Red, green, blue, 0 to 255."""
LONGEST_CODE_BITS = 12


def gif(
    frames: Sequence[UInt8[np.ndarray, "height width"]], palette: Sequence[Colour], durations_ms: Sequence[int]
) -> bytes:
    """Frames of equal size, whose pixels are numbers in the palette (of at most 256); repeated for ever."""
    height, width = frames[0].shape
    bits = max(2, (len(palette) - 1).bit_length())
    table = bytes(channel for colour in palette for channel in colour).ljust(3 * 2**bits, b"\0")
    parts = [b"GIF89a", struct.pack("<HHBBB", width, height, 0xF0 | (bits - 1), 0, 0), table]
    parts.append(b"\x21\xff\x0bNETSCAPE2.0\x03\x01" + struct.pack("<H", 0) + b"\0")
    for frame, duration_ms in zip(frames, durations_ms, strict=True):
        parts.append(b"\x21\xf9\x04\x04" + struct.pack("<H", round(duration_ms / 10)) + b"\0\0")
        parts.append(b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + bytes([bits]))
        data = compressed(frame.tobytes(), bits)
        blocks = [data[start : start + 255] for start in range(0, len(data), 255)]
        parts += [bytes([len(block)]) + block for block in blocks] + [b"\0"]
    return b"".join([*parts, b"\x3b"])


def compressed(pixels: bytes, bits: int) -> bytes:
    """Lempel-Ziv-Welch with codes that grow from `bits + 1` to 12 bits, least significant bit first."""
    clear, end = 1 << bits, (1 << bits) + 1
    codes: dict[tuple[int, int], int] = {}
    packed, held, held_bits = bytearray(), 0, 0
    code_bits, next_code = bits + 1, end + 1

    def put(code: int) -> None:
        nonlocal held, held_bits
        held |= code << held_bits
        held_bits += code_bits
        while held_bits >= 8:
            packed.append(held & 255)
            held, held_bits = held >> 8, held_bits - 8

    put(clear)
    prefix = pixels[0]
    for pixel in pixels[1:]:
        longer = codes.get((prefix, pixel))
        if longer is not None:
            prefix = longer
            continue
        put(prefix)
        codes[prefix, pixel] = next_code
        # The reader is one code behind, so a length lasts until its first code beyond it is about to be written.
        if next_code == 1 << code_bits and code_bits < LONGEST_CODE_BITS:
            code_bits += 1
        next_code += 1
        if next_code == 1 << LONGEST_CODE_BITS:
            put(clear)
            codes, code_bits, next_code = {}, bits + 1, end + 1
        prefix = pixel
    put(prefix)
    put(end)
    if held_bits:
        packed.append(held)
    return bytes(packed)
