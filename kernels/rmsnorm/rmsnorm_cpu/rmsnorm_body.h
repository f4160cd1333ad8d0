// The CPU body, compiled once per instruction set: the including file defines RMSNORM_BODY (the
// table's name) and RMSNORM_ISA (0, 2 or 512), and has included everything this needs. No include
// guard, internal linkage throughout.
//
// A row is cut into tiles of at most kTile columns that stay in L1. Contiguous tiles are read and
// written in place; strided ones and a row's last columns go through a buffer that is padded with
// zeros to whole groups of kLanes, so the loops have no tails. A row is read twice, for its sum and
// for its result; each tile is read before it is written, which allows results over the operands.
//
// Bits do not depend on the instruction set: sums of a tile have kLanes fixed parts, products and
// sums are rounded separately (-ffp-contract=off). Tiles are summed in fp64, so that long rows lose
// nothing.

namespace rmsnorm {
namespace {

constexpr int kTile = 1024;
// Short rows are done together, so that their chains of latencies overlap.
constexpr int kGroup = 4;
constexpr int kWidth = RMSNORM_ISA == 512 ? 16 : RMSNORM_ISA == 2 ? 8 : 4;
constexpr int kVectors = kLanes / kWidth;

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
using Shorts = uint16_t __attribute__((vector_size(2 * kWidth)));

#define RMSNORM_INLINE inline __attribute__((always_inline))

RMSNORM_INLINE Floats all(float value) { return Floats{} + value; }

// Every NaN as the positive quiet NaN without payload.
RMSNORM_INLINE Floats quiet(Floats value) {
  return value == value ? value : all(__builtin_nanf(""));
}

// The nearest bfloat16 in the upper half of each word, for numbers; the lower half is arbitrary.
RMSNORM_INLINE Words bfloat16_words(Floats value) {
  const Words bits = reinterpret_cast<Words>(value);
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

// Conversions that the compiler does badly or not at all.
#if RMSNORM_ISA == 512
RMSNORM_INLINE Words widen_shorts(Shorts shorts) {
  return reinterpret_cast<Words>(
      _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(shorts)));
}
RMSNORM_INLINE Shorts narrow_words(Words words) {
  return reinterpret_cast<Shorts>(
      _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(words)));
}
using Halves = __m256i;
RMSNORM_INLINE Floats widen_halves(Halves halves) { return _mm512_maskz_cvtph_ps(0xffff, halves); }
RMSNORM_INLINE Halves narrow_halves(Floats value) {
  return _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif RMSNORM_ISA == 2
RMSNORM_INLINE Words widen_shorts(Shorts shorts) {
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(shorts)));
}
RMSNORM_INLINE Shorts narrow_words(Words words) {
  const auto both = reinterpret_cast<__m256i>(words);
  return reinterpret_cast<Shorts>(
      _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
}
using Halves = __m128i;
RMSNORM_INLINE Floats widen_halves(Halves halves) { return _mm256_cvtph_ps(halves); }
RMSNORM_INLINE Halves narrow_halves(Floats value) {
  return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
}
#else
RMSNORM_INLINE Words widen_shorts(Shorts shorts) { return __builtin_convertvector(shorts, Words); }
RMSNORM_INLINE Shorts narrow_words(Words words) { return __builtin_convertvector(words, Shorts); }
struct Halves {
  Half of[kWidth];
};
#if defined(__x86_64__)
__attribute__((noinline))  // a page of integer code without F16C
#endif
Floats widen_halves(Halves halves) {
  Floats value;
  for (int i = 0; i < kWidth; ++i) value[i] = static_cast<float>(halves.of[i]);
  return value;
}
#if defined(__x86_64__)
__attribute__((noinline))
#endif
Halves narrow_halves(Floats value) {
  Halves halves;
  for (int i = 0; i < kWidth; ++i) halves.of[i] = Half(value[i]);
  return halves;
}
#endif

template <typename V>
RMSNORM_INLINE V read(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}
template <typename V>
RMSNORM_INLINE void write(V value, void* to) {
  __builtin_memcpy(to, &value, sizeof(value));
}

template <typename T>
RMSNORM_INLINE Floats load(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return read<Floats>(from);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<Floats>(widen_shorts(read<Shorts>(from)) << 16);
  } else {
    return widen_halves(read<Halves>(from));
  }
}

template <typename T>
RMSNORM_INLINE void store(Floats value, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    write(quiet(value), to);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words words = value == value ? bfloat16_words(value) : Words{} + 0x7fc00000u;
    write(narrow_words(words >> 16), to);
  } else {
    write(narrow_halves(quiet(value)), to);
  }
}

// NaNs stay NaNs of any kind.
template <typename T>
RMSNORM_INLINE Floats round_to(Floats value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words nans = reinterpret_cast<Words>(value != value);
    return reinterpret_cast<Floats>((bfloat16_words(value) | nans) & 0xffff0000u);
  } else {
    return widen_halves(narrow_halves(value));
  }
}

// The running sums of a tile. Unrolled loops keep the compiler from memset and memcpy here, which
// cost a short row a fifth of its time.
struct Sums {
  Floats of[kVectors];

  Sums() {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) of[i] = Floats{};
  }

  float total() const {
    Floats sums[kVectors / 2];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors / 2; ++i) sums[i] = of[i] + of[i + kVectors / 2];
#pragma GCC unroll 16
    for (int half = kVectors / 4; half > 0; half /= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    float lanes[kWidth];
    write(sums[0], lanes);
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

// Loops over a tile of whole groups.

// Return the sum of squares.
template <typename X>
float square_tile(const X* x, int n) {
  Sums sums;
  for (int i = 0; i < n; i += kLanes) {
#pragma GCC unroll 16
    for (int u = 0; u < kVectors; ++u) {
      const Floats value = load(x + i + u * kWidth);
      sums.of[u] += value * value;
    }
  }
  return sums.total();
}

template <typename X>
float add_square_tile(const X* x, const X* residual, int n, X* residual_out) {
  Sums sums;
  for (int i = 0; i < n; i += kLanes) {
#pragma GCC unroll 16
    for (int u = 0; u < kVectors; ++u) {
      const int at = i + u * kWidth;
      const Floats value = round_to<X>(load(x + at) + load(residual + at));
      store(value, residual_out + at);
      sums.of[u] += value * value;
    }
  }
  return sums.total();
}

template <typename X, typename Y>
using ScaleTile = void (*)(const X* v, float rstd, const float* weight, const float* bias, int n,
                           Y* y);

template <typename X, bool kBias>
void scale_tile(const X* v, float rstd, const float* weight, const float* bias, int n, X* y) {
  for (int i = 0; i < n; i += kWidth) {
    Floats value = load(v + i) * rstd * load(weight + i);
    if constexpr (kBias) value += load(bias + i);
    store(value, y + i);
  }
}

// With the normalised values rounded to N.
template <typename X, typename N, typename Y, bool kBias>
void scale_rounded_tile(const X* v, float rstd, const float* weight, const float* bias, int n,
                        Y* y) {
  for (int i = 0; i < n; i += kWidth) {
    Floats value = round_to<N>(load(v + i) * rstd) * load(weight + i);
    if constexpr (kBias) value = round_to<Y>(value) + load(bias + i);
    store(value, y + i);
  }
}

template <typename X, typename Y>
ScaleTile<X, Y> choose_scale_tile(const ForwardJob& job) {
  const bool bias = job.bias != nullptr;
  if constexpr (std::is_same_v<X, Y>) {
    if (job.rounding == Rounding::kOnce || job.weight == nullptr) {
      return bias ? scale_tile<X, true> : scale_tile<X, false>;
    }
  } else if constexpr (std::is_same_v<Y, float>) {
    if (job.rounding == Rounding::kInputDtype) {
      return bias ? scale_rounded_tile<X, X, Y, true> : scale_rounded_tile<X, X, Y, false>;
    }
  }
  return bias ? scale_rounded_tile<X, Y, Y, true> : scale_rounded_tile<X, Y, Y, false>;
}

// Sum of dy * w * n; with kDweight, dy * n is added to dweight.
template <typename X, typename DY, bool kDweight>
float dot_tile(const DY* dy, const X* x, float rstd, const float* weight, int n, float* dweight) {
  Sums sums;
  for (int i = 0; i < n; i += kLanes) {
#pragma GCC unroll 16
    for (int u = 0; u < kVectors; ++u) {
      const int at = i + u * kWidth;
      const Floats grad = load(dy + at), normalised = load(x + at) * rstd;
      sums.of[u] += grad * load(weight + at) * normalised;
      if constexpr (kDweight) write(load(dweight + at) + grad * normalised, dweight + at);
    }
  }
  return sums.total();
}

template <typename DY>
void add_tile(const DY* dy, int n, float* dbias) {
  for (int i = 0; i < n; i += kWidth) write(load(dbias + i) + load(dy + i), dbias + i);
}

template <typename X, typename DY, bool kDresidual>
void dx_tile(const DY* dy, const X* x, float rstd, const float* weight, float mean_dot,
             const X* dresidual, int n, X* dx) {
  for (int i = 0; i < n; i += kWidth) {
    const Floats grad = load(dy + i) * load(weight + i), normalised = load(x + i) * rstd;
    Floats value = rstd * (grad - normalised * mean_dot);
    if constexpr (kDresidual) value += load(dresidual + i);
    store(value, dx + i);
  }
}

// Tiles of rows.

// A tile is whole groups, or less than one group at the end of the row.
int tile_size(int64_t left) {
  const int n = static_cast<int>(left < kTile ? left : kTile);
  return n < kLanes ? n : n - n % kLanes;
}
int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }
bool in_place(int64_t stride, int n) { return stride == 1 && n % kLanes == 0; }

// An operand's tile in whole groups.
template <typename T>
const T* fetch(const T* from, int64_t stride, int n, T* buffer) {
  if (in_place(stride, n)) return from;
  for (int i = 0; i < n; ++i) buffer[i] = from[i * stride];
  std::memset(static_cast<void*>(buffer + n), 0, (padded(n) - n) * sizeof(T));
  return buffer;
}

// The same for results: where to write the tile, and bringing it home.
template <typename T>
T* target(T* to, int64_t stride, int n, T* buffer) {
  return in_place(stride, n) ? to : buffer;
}
template <typename T>
void deliver(const T* buffer, int64_t stride, int n, T* to) {
  if (in_place(stride, n)) return;
  for (int i = 0; i < n; ++i) to[i * stride] = buffer[i];
}

// Tiles of weights or biases in fp32.
class ColumnTiles {
 public:
  explicit ColumnTiles(const Columns& columns) : columns_(columns) {
    if (columns.data != nullptr) return;
    for (int i = 0; i < kTile; ++i) buffer_[i] = 1.0f;
  }

  __attribute__((noinline)) const float* at(int64_t column, int n) {
    if (columns_.data == nullptr) return buffer_;
    if (columns_.dtype == warpsmith::dtype_of<BFloat16>) return widened<BFloat16>(column, n);
    if (columns_.dtype == warpsmith::dtype_of<Half>) return widened<Half>(column, n);
    return columns_.offset != 0.0f ? widened<float>(column, n) : fetched<float>(column, n, buffer_);
  }

 private:
  template <typename T>
  const T* fetched(int64_t column, int n, T* buffer) const {
    return fetch(static_cast<const T*>(columns_.data) + column * columns_.stride, columns_.stride,
                 n, buffer);
  }
  template <typename T>
  const float* widened(int64_t column, int n) {
    T narrow[kTile];
    const T* from = fetched<T>(column, n, narrow);
    for (int i = 0; i < padded(n); i += kWidth) {
      Floats value = load(from + i);
      if (columns_.offset != 0.0f) value += columns_.offset;
      write(value, buffer_ + i);
    }
    return buffer_;
  }

  const Columns columns_;
  float buffer_[kTile];
};

// The offsets of one row after the other, without a division per row.
class RowCursor {
 public:
  RowCursor(const Rows& rows, int64_t row) : rows_(rows) {
    for (int dim = 0; dim < rows.num_dims; ++dim) {
      index_[dim] = row % rows.sizes[dim];
      row /= rows.sizes[dim];
      move(dim, index_[dim]);
    }
  }
  int64_t offset(int operand) const { return offsets_[operand]; }
  void next() {
    for (int dim = 0; dim < rows_.num_dims; ++dim) {
      move(dim, 1);
      if (++index_[dim] < rows_.sizes[dim]) return;
      move(dim, -index_[dim]);
      index_[dim] = 0;
    }
  }

 private:
  void move(int dim, int64_t steps) {
    for (int i = 0; i < kRowOperands; ++i) offsets_[i] += steps * rows_.strides[dim][i];
  }

  const Rows& rows_;
  int64_t index_[kMaxRowDims];
  int64_t offsets_[kRowOperands] = {};
};

template <typename X, typename Y>
class ForwardRows {
 public:
  ForwardRows(const ForwardJob& job, const Columns& weight, const Columns& bias)
      : job_(job), scale_(choose_scale_tile<X, Y>(job)), weights_(weight), biases_(bias) {}

  void run(int64_t begin, int64_t end) {
    const int64_t group = kGroup * job_.hidden <= kTile ? kGroup : 1;
    Row rows[kGroup];
    float rstds[kGroup];
    const double hidden = static_cast<double>(job_.hidden);
    RowCursor cursor(job_.rows, begin);
    for (int64_t n; begin < end; begin += n) {
      n = group < end - begin ? group : end - begin;
      for (int i = 0; i < n; ++i, cursor.next()) {
        rows[i] = at(cursor);
        rstds[i] = static_cast<float>(sum_of_squares(rows[i]) / hidden);
      }
      for (int i = 0; i < n; ++i) {
        rstds[i] = 1.0f / __builtin_sqrtf(rstds[i] + job_.eps);
      }
      for (int i = 0; i < n; ++i) {
        if (job_.rstd != nullptr) {
          *rows[i].rstd = rstds[i] == rstds[i] ? rstds[i] : __builtin_nanf("");
        }
        scale_row(rows[i], rstds[i]);
      }
    }
  }

 private:
  struct Row {
    Y* y;
    const X* x;
    const X* residual;
    X* residual_out;
    float* rstd;
  };

  Row at(const RowCursor& cursor) const {
    return {static_cast<Y*>(job_.y) + cursor.offset(ForwardJob::kY),
            static_cast<const X*>(job_.x) + cursor.offset(ForwardJob::kX),
            static_cast<const X*>(job_.residual) + cursor.offset(ForwardJob::kResidual),
            static_cast<X*>(job_.residual_out) + cursor.offset(ForwardJob::kResidualOut),
            job_.rstd + cursor.offset(ForwardJob::kRstd)};
  }

  double sum_of_squares(const Row& row) {
    double sum = 0;
    const auto [y_stride, x_stride, residual_stride, out_stride] = job_.column_strides;
    for (int64_t at = 0, n; at < job_.hidden; at += n) {
      n = tile_size(job_.hidden - at);
      const X* x = fetch(row.x + at * x_stride, x_stride, n, v_buffer_);
      if (job_.residual == nullptr) {
        sum += square_tile(x, padded(n));
        continue;
      }
      const X* residual =
          fetch(row.residual + at * residual_stride, residual_stride, n, residual_buffer_);
      X* out = target(row.residual_out + at * out_stride, out_stride, n, out_buffer_);
      sum += add_square_tile(x, residual, padded(n), out);
      deliver(out, out_stride, n, row.residual_out + at * out_stride);
    }
    return sum;
  }

  void scale_row(const Row& row, float rstd) {
    const bool add = job_.residual != nullptr;
    const X* v = add ? row.residual_out : row.x;
    const int64_t v_stride = job_.column_strides[add ? ForwardJob::kResidualOut : ForwardJob::kX];
    const int64_t y_stride = job_.column_strides[ForwardJob::kY];
    for (int64_t at = 0, n; at < job_.hidden; at += n) {
      n = tile_size(job_.hidden - at);
      const X* v_tile = fetch(v + at * v_stride, v_stride, n, v_buffer_);
      Y* y = target(row.y + at * y_stride, y_stride, n, y_buffer_);
      const float* bias = job_.bias != nullptr ? biases_.at(at, n) : nullptr;
      scale_(v_tile, rstd, weights_.at(at, n), bias, padded(n), y);
      deliver(y, y_stride, n, row.y + at * y_stride);
    }
  }

  const ForwardJob& job_;
  const ScaleTile<X, Y> scale_;
  ColumnTiles weights_, biases_;
  X v_buffer_[kTile], residual_buffer_[kTile], out_buffer_[kTile];
  Y y_buffer_[kTile];
};

template <typename X, typename DY>
class BackwardRows {
 public:
  BackwardRows(const BackwardJob& job, const Columns& weight, float* dweight, float* dbias)
      : job_(job), weights_(weight), dweight_(dweight), dbias_(dbias) {}

  void run(int64_t begin, int64_t end) {
    RowCursor cursor(job_.rows, begin);
    for (; begin < end; ++begin, cursor.next()) {
      const DY* dy = static_cast<const DY*>(job_.dy) + cursor.offset(BackwardJob::kDy);
      const X* x = static_cast<const X*>(job_.x) + cursor.offset(BackwardJob::kX);
      const X* dresidual = job_.dresidual == nullptr ? nullptr
                                                     : static_cast<const X*>(job_.dresidual) +
                                                           cursor.offset(BackwardJob::kDresidual);
      const float rstd = job_.rstd[cursor.offset(BackwardJob::kRstd)];
      const float mean_dot =
          static_cast<float>(dot(dy, x, rstd) / static_cast<double>(job_.hidden));
      dx_row(dy, x, rstd, mean_dot, dresidual,
             static_cast<X*>(job_.dx) + cursor.offset(BackwardJob::kDx));
    }
  }

 private:
  double dot(const DY* dy, const X* x, float rstd) {
    double sum = 0;
    const auto [dx_stride, dy_stride, x_stride, dresidual_stride] = job_.column_strides;
    for (int64_t at = 0, n; at < job_.hidden; at += n) {
      n = tile_size(job_.hidden - at);
      const DY* dy_tile = fetch(dy + at * dy_stride, dy_stride, n, dy_buffer_);
      const X* x_tile = fetch(x + at * x_stride, x_stride, n, x_buffer_);
      const float* weight = weights_.at(at, n);
      if (dweight_ == nullptr) {
        sum += dot_tile<X, DY, false>(dy_tile, x_tile, rstd, weight, padded(n), nullptr);
      } else {
        float* tile = sum_tile(dweight_ + at, n);
        sum += dot_tile<X, DY, true>(dy_tile, x_tile, rstd, weight, padded(n), tile);
        deliver(tile, 1, n, dweight_ + at);
      }
      if (dbias_ != nullptr) {
        float* tile = sum_tile(dbias_ + at, n);
        add_tile(dy_tile, padded(n), tile);
        deliver(tile, 1, n, dbias_ + at);
      }
    }
    return sum;
  }

  float* sum_tile(float* sums, int n) {
    fetch(static_cast<const float*>(sums), 1, n, sum_buffer_);
    return target(sums, 1, n, sum_buffer_);
  }

  void dx_row(const DY* dy, const X* x, float rstd, float mean_dot, const X* dresidual, X* dx) {
    const auto [dx_stride, dy_stride, x_stride, dresidual_stride] = job_.column_strides;
    for (int64_t at = 0, n; at < job_.hidden; at += n) {
      n = tile_size(job_.hidden - at);
      const DY* dy_tile = fetch(dy + at * dy_stride, dy_stride, n, dy_buffer_);
      const X* x_tile = fetch(x + at * x_stride, x_stride, n, x_buffer_);
      const float* weight = weights_.at(at, n);
      X* dx_at = dx + at * dx_stride;
      X* tile = target(dx_at, dx_stride, n, dx_buffer_);
      if (dresidual == nullptr) {
        dx_tile<X, DY, false>(dy_tile, x_tile, rstd, weight, mean_dot, nullptr, padded(n), tile);
      } else {
        const X* add =
            fetch(dresidual + at * dresidual_stride, dresidual_stride, n, dresidual_buffer_);
        dx_tile<X, DY, true>(dy_tile, x_tile, rstd, weight, mean_dot, add, padded(n), tile);
      }
      deliver(tile, dx_stride, n, dx_at);
    }
  }

  const BackwardJob& job_;
  ColumnTiles weights_;
  float* const dweight_;  // partial sums, or null
  float* const dbias_;
  DY dy_buffer_[kTile];
  X x_buffer_[kTile], dresidual_buffer_[kTile], dx_buffer_[kTile];
  float sum_buffer_[kLanes];
};

template <typename W>
void reduce_columns(const BackwardJob& job, int which, int num_sums, void* result, int64_t begin,
                    int64_t end) {
  float sums[kTile], tail[kLanes];
  W narrow[kLanes];
  for (int64_t n; begin < end; begin += n) {
    n = tile_size(end - begin);
    std::memset(sums, 0, sizeof(sums));
    for (int64_t part = 0; part < job.num_partials; ++part) {
      const float* from = job.partials + (part * num_sums + which) * job.hidden + begin;
      add_tile(fetch(from, 1, n, tail), padded(n), sums);
    }
    W* to = static_cast<W*>(result) + begin;
    W* tile = target(to, 1, n, narrow);
    for (int i = 0; i < padded(n); i += kWidth) store(load(sums + i), tile + i);
    deliver(tile, 1, n, to);
  }
}

// Calls f with a value of the dtype's type; the checks admit no other dtypes.
template <typename F>
void with_type(ScalarType dtype, F&& f) {
  switch (dtype) {
    case warpsmith::dtype_of<float>:
      return f(float{});
    case warpsmith::dtype_of<Half>:
      return f(Half{});
    case warpsmith::dtype_of<BFloat16>:
      return f(BFloat16{});
    default:
      return;
  }
}

void widen_columns(const Columns& columns, int64_t hidden, float* to) {
  ColumnTiles tiles(columns);
  for (int64_t at = 0, n; at < hidden; at += n) {
    n = tile_size(hidden - at);
    std::memcpy(to + at, tiles.at(at, n), padded(n) * sizeof(float));
  }
}

void forward_range(const ForwardJob& job, const Columns& weight, const Columns& bias, int64_t begin,
                   int64_t end) {
  with_type(job.x_dtype, [&](auto x) {
    with_type(job.y_dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      ForwardRows<X, Y>(job, weight, bias).run(begin, end);
    });
  });
}

void backward_range(const BackwardJob& job, const Columns& weight, int64_t begin, int64_t end,
                    float* partial) {
  float* dweight = job.dweight != nullptr ? partial : nullptr;
  float* dbias = job.dbias == nullptr ? nullptr : partial + (dweight != nullptr ? job.hidden : 0);
  with_type(job.x_dtype, [&](auto x) {
    with_type(job.dy_dtype, [&](auto dy) {
      using X = decltype(x);
      using DY = decltype(dy);
      BackwardRows<X, DY>(job, weight, dweight, dbias).run(begin, end);
    });
  });
}

void reduce_range(const BackwardJob& job, int64_t begin, int64_t end) {
  void* const results[2] = {job.dweight, job.dbias};
  const int num_sums = (job.dweight != nullptr) + (job.dbias != nullptr);
  with_type(job.weight_dtype, [&](auto w) {
    int which = 0;
    for (void* result : results) {
      if (result == nullptr) continue;
      reduce_columns<decltype(w)>(job, which++, num_sums, result, begin, end);
    }
  });
}

#undef RMSNORM_INLINE

}  // namespace

const Body RMSNORM_BODY = {widen_columns, forward_range, backward_range, reduce_range};

}  // namespace rmsnorm
