"""e2m1 (FP4) in Triton, by integer instructions: only sm_100 and later convert it by themselves.

Two codes share a byte, the dim of lower index in the low bits.
"""

import triton
import triton.language as tl


@triton.jit
def decode_e2m1(code):
    """float32 values of e2m1 codes, the low four bits of uint8, exact."""
    # Read the bits as float16: its exponent bias is 15 instead of 1.
    bits = ((code & 8).to(tl.uint16) << 12) | ((code & 7).to(tl.uint16) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def encode_e2m1(x):
    """uint8 e2m1 codes of float32 values, nearest even, saturating at +-6; NaN becomes 6."""
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.uint8) + (magnitude >= 0.75).to(tl.uint8)
    code += (magnitude > 1.25).to(tl.uint8) + (magnitude >= 1.75).to(tl.uint8)
    code += (magnitude > 2.5).to(tl.uint8) + (magnitude >= 3.5).to(tl.uint8)
    code += (magnitude > 5.0).to(tl.uint8)
    sign = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.uint8) & 8
    return tl.where(x != x, 7, sign | code).to(tl.uint8)


@triton.jit
def unpack_e2m1(pairs):
    """float32 ``[..., 2 n]`` of bytes ``[..., n]``."""
    return tl.interleave(decode_e2m1(pairs), decode_e2m1(pairs >> 4))


@triton.jit
def pack_e2m1(x):
    """Bytes ``[rows, n]`` of float32 ``x [rows, 2 n]``."""
    low, high = tl.split(tl.reshape(encode_e2m1(x), [x.shape[0], x.shape[1] // 2, 2]))
    return low | (high << 4)
