// uint8 rows with unit output stride, for AVX2 and AVX-512; part of img2gray_body.h for these two.
//
// A step brings the channels of kLanes pixels straight into 32-bit lanes (one byte shuffle per
// channel for packed rows), evaluates the chain in fp32 and converts to integers; four steps are
// packed into one store. The packs saturate, except that a float above the int32 range would
// convert to the smallest integer: hence the minimum.

namespace img2gray {
namespace {

#if IMG2GRAY_ISA == 512

using Ints = __m512i;
using Floats = __m512;

Ints set_all(int value) { return _mm512_set1_epi32(value); }
Floats set_all(float value) { return _mm512_set1_ps(value); }
Ints load_bytes(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
Ints load_words(const uint8_t* from) { return _mm512_loadu_si512(from); }
// 16 pixels of 3 bytes; reads 16 bytes more.
Ints load_triples(const uint8_t* from) { return _mm512_loadu_si512(from); }
constexpr int kTriplesOverread = 16;
// Byte 4 * lane of the result is channel `c` of the lane's pixel, the others are 0.
Ints channel_picks(int c) {
  alignas(64) int32_t picks[16];
  for (int lane = 0; lane < 16; ++lane) picks[lane] = 3 * lane + c;
  return _mm512_load_si512(picks);
}
Ints pick(Ints triples, Ints picks) {
  return _mm512_maskz_permutexvar_epi8(0x1111111111111111u, picks, triples);
}
Ints byte_of(Ints words, int byte) {
  return _mm512_and_si512(_mm512_srli_epi32(words, 8 * byte), set_all(255));
}
Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
template <Conversion kConversion>
Ints to_ints(Floats value) {
  if constexpr (kConversion == Conversion::kTruncate) return _mm512_cvttps_epi32(value);
  return _mm512_cvt_roundps_epi32(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
void store_packed(Ints a, Ints b, Ints c, Ints d, uint8_t* to) {
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const Ints bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}

#else

using Ints = __m256i;
using Floats = __m256;

Ints set_all(int value) { return _mm256_set1_epi32(value); }
Floats set_all(float value) { return _mm256_set1_ps(value); }
Ints load_bytes(const uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
Ints load_words(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
// 4 pixels of 3 bytes in each half; reads 4 bytes more.
Ints load_triples(const uint8_t* from) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 12)), 1);
}
constexpr int kTriplesOverread = 4;
// Byte 4 * lane of the result is channel `c` of the lane's pixel, the others are 0.
Ints channel_picks(int c) {
  constexpr int kZeros = static_cast<int>(0x80808000u);
  const __m128i picks =
      _mm_setr_epi32(kZeros | c, kZeros | (c + 3), kZeros | (c + 6), kZeros | (c + 9));
  return _mm256_broadcastsi128_si256(picks);
}
Ints pick(Ints triples, Ints picks) { return _mm256_shuffle_epi8(triples, picks); }
Ints byte_of(Ints words, int byte) {
  return _mm256_and_si256(_mm256_srli_epi32(words, 8 * byte), set_all(255));
}
Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Floats minimum(Floats a, Floats b) { return _mm256_min_ps(a, b); }
template <Conversion kConversion>
Ints to_ints(Floats value) {
  if constexpr (kConversion == Conversion::kTruncate) return _mm256_cvttps_epi32(value);
  return _mm256_cvttps_epi32(_mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
void store_packed(Ints a, Ints b, Ints c, Ints d, uint8_t* to) {
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const Ints bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
}

#endif

constexpr int kLanes = sizeof(Ints) / sizeof(int32_t);

enum class ByteRow { kPacked3, kPacked4, kPlanar };

// Returns how many of the `n` pixels it has done; the rest is too short for a store.
template <ByteRow kRow, Conversion kConversion>
int64_t byte_row(const GrayMath<uint8_t>& math, const uint8_t* src, int64_t channel_stride,
                 int red_channel, int64_t n, uint8_t* dst) {
  const Floats weights[3] = {set_all(math.red), set_all(math.green), set_all(math.blue)};
  const Floats bias = set_all(math.bias), limit = set_all(255.0f);
  const int order[3] = {red_channel, 1, 2 - red_channel};
  const Ints picks[3] = {channel_picks(order[0]), channel_picks(1), channel_picks(order[2])};
  const bool reversed = red_channel != 0;
  const auto gray = [&](int64_t first) __attribute__((always_inline)) {
    Ints channel[3];
    if constexpr (kRow == ByteRow::kPacked3) {
      const Ints triples = load_triples(src + 3 * first);
      for (int c = 0; c < 3; ++c) channel[c] = pick(triples, picks[c]);
    } else if constexpr (kRow == ByteRow::kPacked4) {
      const Ints words = load_words(src + 4 * first);
      const Ints low = byte_of(words, 0), high = byte_of(words, 2);
      channel[0] = reversed ? high : low;
      channel[1] = byte_of(words, 1);
      channel[2] = reversed ? low : high;
    } else {
      for (int c = 0; c < 3; ++c) {
        channel[c] = load_bytes(src + order[c] * channel_stride + first);
      }
    }
    Floats sum = bias;
    for (int c = 0; c < 3; ++c) sum = multiply_add(to_floats(channel[c]), weights[c], sum);
    return to_ints<kConversion>(minimum(sum, limit));
  };
  const int overread = kRow == ByteRow::kPacked3 ? (kTriplesOverread + 2) / 3 : 0;
  int64_t i = 0;
  for (; i + 4 * kLanes + overread <= n; i += 4 * kLanes) {
    store_packed(gray(i), gray(i + kLanes), gray(i + 2 * kLanes), gray(i + 3 * kLanes), dst + i);
  }
  return i;
}

template <ByteRow kRow>
int64_t byte_row(const GrayMath<uint8_t>& math, const uint8_t* src, int64_t channel_stride,
                 int red_channel, int64_t n, uint8_t* dst) {
  return math.conversion == Conversion::kTruncate
             ? byte_row<kRow, Conversion::kTruncate>(math, src, channel_stride, red_channel, n, dst)
             : byte_row<kRow, Conversion::kRound>(math, src, channel_stride, red_channel, n, dst);
}

}  // namespace
}  // namespace img2gray
