// Conversions of bfloat16, which is the upper half of a float. Included inside each instruction set's namespace.

void from_bfloat16(const uint16_t* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

// Ties to even: half of the last kept bit is added, a little less where that bit is 0.
void to_bfloat16(const float* x, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out[i] = static_cast<uint16_t>(x[i] == x[i] ? rounded : 0x7fc0u);
  }
}
