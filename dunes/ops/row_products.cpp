// dunes::row_products, as in row_products.py: products of a few rows, with sums in vectors along the inputs.
// A tile multiplies W weight rows by R rows of x, so each weight is widened once for R rows. All sums have the same
// order of additions, so a row's outputs depend neither on other rows nor on the number of threads.
// Shapes: I inputs, O outputs, N rows of x.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int BYTES = 64, W = 4, R = 6;  // 24 sums, 4 weights and a part of x fit into 32 registers
#elif defined(__AVX__)
constexpr int BYTES = 32, W = 2, R = 6;  // 12 sums of 16 registers
#else
constexpr int BYTES = 16, W = 4, R = 4;
#endif
constexpr int LANES = BYTES / 4;
constexpr int64_t GRAIN = 1 << 17;  // fewest multiplications for a thread

typedef float Floats __attribute__((vector_size(BYTES)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef _Float16 Float16s __attribute__((vector_size(BYTES / 2)));
struct BFloat16 {
  uint16_t bits;
};

inline Floats widen(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Floats widen(const BFloat16* p) {
#if defined(__AVX512F__)  // GCC 12 splits the vector
  return (Floats)((Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
  return (Floats)((Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)) << 16);
#else
  Halves v;
  std::memcpy(&v, p, sizeof v);
  return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
}

inline Floats widen(const _Float16* p) {
#if defined(__AVX512F__)  // GCC converts one number at a time
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Float16s v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Floats);
#endif
}

// The first n numbers, followed by zeros.
template <bool whole, typename T>
inline Floats load(const T* p, int64_t n) {
  if constexpr (whole) return widen(p);
  T part[LANES] = {};
  std::memcpy(part, p, n * sizeof(T));
  return widen(part);
}

// Of every 2 * width lanes, the first half has sums of a's lanes `width` apart, the second half sums of b's.
template <int width, int... lane>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(a, b, (lane % (2 * width) < width ? lane : lane - width + LANES)...) +
         __builtin_shufflevector(a, b, (lane % (2 * width) < width ? lane + width : lane + LANES)...);
}

// The sums of the lanes of `count` vectors, at lanes LANES / count apart.
template <int count, int width = LANES / 2>
inline Floats sums(const Floats* v) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>();
  if constexpr (width == 0)
    return *v;
  else if constexpr (count > 1) {
    Floats folded[count / 2];
    for (int i = 0; i < count / 2; i++) folded[i] = fold<width>(v[i], v[i + count / 2], lanes);
    return sums<count / 2, width / 2>(folded);
  } else {
    Floats folded = fold<width>(*v, *v, lanes);
    return sums<1, width / 2>(&folded);
  }
}

template <bool whole, int w_rows, int x_rows, typename T>
inline void multiply(const float* x, const T* w, Floats (&total)[x_rows][w_rows], int64_t inputs, int64_t n) {
  Floats weights[w_rows];
  for (int i = 0; i < w_rows; i++) {
    weights[i] = load<whole>(w + i * inputs, n);
    __builtin_prefetch(w + (i + w_rows) * inputs);  // the processor does not foresee reading rows several times
  }
  for (int r = 0; r < x_rows; r++) {
    Floats row = load<whole>(x + r * inputs, n);
#ifdef __x86_64__
    asm("" : "+v"(row));  // else GCC loads it again for each weight
#endif
    for (int i = 0; i < w_rows; i++) total[r][i] += weights[i] * row;
  }
}

template <int w_rows, int x_rows, typename T>
void tile(const float* x, const T* w, float* y, int64_t inputs, int64_t outputs) {
  Floats total[x_rows][w_rows] = {};
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) multiply<true>(x + i, w + i, total, inputs, LANES);
  if (i < inputs) multiply<false>(x + i, w + i, total, inputs, inputs - i);
  for (int r = 0; r < x_rows; r++) {
    Floats row = sums<w_rows>(total[r]);
    for (int o = 0; o < w_rows; o++) y[r * outputs + o] = row[o * (LANES / w_rows)];
  }
}

// Tiles of `w_rows` weight rows for all rows of x, in blocks of nearly equal sizes of at most R rows.
template <int w_rows, typename T, int... size>
void blocks(const float* x, const T* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
            std::integer_sequence<int, size...>) {
  constexpr decltype(&tile<w_rows, 1, T>) tiles[] = {tile<w_rows, size + 1, T>...};
  for (int64_t n; rows; rows -= n, x += n * inputs, y += n * outputs) {
    n = (rows - 1) / ((rows + R - 1) / R) + 1;
    tiles[n - 1](x, w, y, inputs, outputs);
  }
}

template <typename T>
void products(const Tensor& x, const Tensor& weight, Tensor& y) {
  auto rows = x.size(0), inputs = x.size(1), outputs = weight.size(0);
  auto from = (const float*)x.const_data_ptr();
  auto matrix = (const T*)weight.const_data_ptr();
  auto to = (float*)y.mutable_data_ptr();
  auto sizes = std::make_integer_sequence<int, R>();
  auto work = [=](int64_t first, int64_t last) {
    int64_t o = first * W, end = std::min(last * W, outputs);
    for (; o + W <= end; o += W) blocks<W>(from, matrix + o * inputs, to + o, rows, inputs, outputs, sizes);
    for (; o < end; o++) blocks<1>(from, matrix + o * inputs, to + o, rows, inputs, outputs, sizes);
  };
  int64_t grain = GRAIN / (W * std::max<int64_t>(1, rows * inputs)) + 1;
  torch::stable::parallel_for(0, (outputs + W - 1) / W, grain, work);
}

Tensor row_products(const Tensor& x_given, const Tensor& weight_given) {
  using torch::headeronly::ScalarType;
  auto x = torch::stable::contiguous(x_given), weight = torch::stable::contiguous(weight_given);
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
                  "row_products: expected x (N, I) and weight (O, I)");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "row_products: expected x in float32");
  auto y = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  auto dtype = weight.scalar_type();
  if (dtype == ScalarType::BFloat16)
    products<BFloat16>(x, weight, y);
  else if (dtype == ScalarType::Half)
    products<_Float16>(x, weight, y);
  else {
    STD_TORCH_CHECK(dtype == ScalarType::Float, "row_products: expected a weight in float32, bfloat16 or float16");
    products<float>(x, weight, y);
  }
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(dunes, CPU, library) { library.impl("row_products", TORCH_BOX(&row_products)); }
