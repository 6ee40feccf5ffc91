// Attention of few queries to keys whose features exist already, as in decoding. Its time is that
// of reading features and values, once each and without a copy.
#pragma once

#include "attention/calls/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Rows of an array of any type as rows of T, zero from `columns` to whole vectors: the array
// itself, or a copy of some rows.
template <typename T>
struct Rows {
  const T* data;
  int64_t stride, width;
  const T* operator[](int64_t row) const { return data + row * stride; }
};
template <typename T>
Rows<T> rows_of(const Array& array, int64_t offset, int64_t rows, int64_t columns, T* copy) {
  const int64_t width = round_up(columns, kLanes<T>);
  if (array.type == kTypeOf<T> && array.stride[3] == 1 && width == columns) {
    return {static_cast<const T*>(array.data) + offset, array.stride[2], width};
  }
  for (int64_t r = 0; r < rows; ++r) {
    load_row(array, offset + r * array.stride[2], array.stride[3], columns, copy + r * width);
    for (int64_t c = columns; c < width; ++c) copy[r * width + c] = 0;
  }
  return {copy, width, width};
}

template <typename T>
T dot(const T* a, const T* b, int64_t width) {
  Vec<T> sums[2] = {};
  int64_t c = 0;
  for (; c + 2 * kLanes<T> <= width; c += 2 * kLanes<T>) {
    sums[0] += load(a + c) * load(b + c);
    sums[1] += load(a + c + kLanes<T>) * load(b + c + kLanes<T>);
  }
  if (c < width) sums[0] += load(a + c) * load(b + c);
  return sum_of_lanes<T>(sums[0] + sums[1]);
}

// Sums over some keys for some queries, relative to exp(maximum).
template <typename T>
struct PartialRows {
  T* maxima = nullptr;  // [kRowsTogether]
  T* sums = nullptr;    // [kRowsTogether]
  T* out = nullptr;     // [kRowsTogether][width of a value]

  void take(Workspace& workspace, int64_t value_width) {
    maxima = workspace.take<T>(kRowsTogether);
    sums = workspace.take<T>(kRowsTogether);
    out = workspace.take<T>(kRowsTogether * value_width);
  }
};

template <typename T>
struct FromFeaturesScratch {
  T* queries = nullptr;  // [kRowsTogether][width of features]
  T* keys = nullptr;     // [64][width of features]
  T* values = nullptr;   // [64][width of a value]
  T* weights = nullptr;  // [kRowsTogether][64]

  void take(Workspace& workspace, int64_t feature_width, int64_t value_width) {
    queries = workspace.take<T>(kRowsTogether * feature_width);
    keys = workspace.take<T>(kPanel * feature_width);
    values = workspace.take<T>(kPanel * value_width);
    weights = workspace.take<T>(kRowsTogether * kPanel);
  }
};

// Returns the largest of some logits, ignoring NaN.
template <typename T>
T largest_logit(const Array& logits, int64_t offset, int64_t begin, int64_t end, T* scratch) {
  T largest = -infinity<T>();
  for (int64_t j = begin; j < end; j += kPanel) {
    const int64_t count = min_of(kPanel, end - j);
    load_row(logits, offset + j * logits.stride[3], logits.stride[3], count, scratch);
    for (int64_t i = 0; i < count; ++i) largest = scratch[i] > largest ? scratch[i] : largest;
  }
  return largest;
}

// Computes the weights (s^2 + eps) exp(logit - reference) in place of the scores in weights [64], 0
// where hidden; returns their sum.
template <typename T>
T weigh(const T* logits, T reference, T eps, T* weights) {
  Vec<T> sum{};
  for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
    const Vec<T> logit = load(logits + c);
    const Vec<T> s = load(weights + c);
    Vec<T> w = (s * s + eps) * exp_bounded<T>(logit - reference);
    w = logit == -infinity<T>() ? Vec<T>{} : w;
    sum += w;
    store<T>(weights + c, w);
  }
  return sum_of_lanes<T>(sum);
}

// Adds sum_j weights_j v_j to out; the values of hidden keys are not read.
template <typename T>
void add_values(const T* logits, const T* weights, int64_t count, const Rows<T>& values, T* out) {
  const auto is_hidden = [&](int64_t j) { return logits[j] == -infinity<T>(); };
  constexpr int64_t kTogether = 4 * kLanes<T>;
  int64_t c = 0;
  for (; c + kTogether <= values.width; c += kTogether) {
    Vec<T> sums[4];
    for (int v = 0; v < 4; ++v) sums[v] = Vec<T>{};
    for (int64_t j = 0; j < count; ++j) {
      if (is_hidden(j)) continue;
      for (int v = 0; v < 4; ++v) sums[v] += load(values[j] + c + v * kLanes<T>) * weights[j];
    }
    for (int v = 0; v < 4; ++v) {
      T* total = out + c + v * kLanes<T>;
      store<T>(total, load(total) + sums[v]);
    }
  }
  for (; c < values.width; c += kLanes<T>) {
    Vec<T> sum{};
    for (int64_t j = 0; j < count; ++j) {
      if (!is_hidden(j)) sum += load(values[j] + c) * weights[j];
    }
    store<T>(out + c, load(out + c) + sum);
  }
}

struct FromFeaturesPlace {
  int64_t b, h, i0, rows;
};

inline int64_t logits_offset(const FromFeaturesParams& params, const FromFeaturesPlace& at,
                             int64_t row, int64_t key) {
  const Array& logits = params.logits;
  return at.b * logits.stride[0] + at.h * logits.stride[1] + (at.i0 + row) * logits.stride[2] +
         key * logits.stride[3];
}

// Loads the features of some queries, divided by 2 F, into the scratch.
template <typename T>
void load_queries(const FromFeaturesParams& params, const FromFeaturesPlace& at, int64_t width,
                  T* out) {
  const Array& query = params.query;
  const int64_t offset = at.b * query.stride[0] + at.h * query.stride[1] + at.i0 * query.stride[2];
  for (int64_t r = 0; r < at.rows; ++r) {
    T* row = out + r * width;
    load_row(query, offset + r * query.stride[2], query.stride[3], params.F, row);
    for (int64_t f = 0; f < params.F; ++f) row[f] *= T(0.5) / static_cast<T>(params.F);
    for (int64_t f = params.F; f < width; ++f) row[f] = 0;
  }
}

// Computes scores [rows][64] with `count` keys from j0 on, zero beyond.
template <typename T>
void score_keys(const FromFeaturesParams& params, const FromFeaturesPlace& at, int64_t j0,
                int64_t count, int64_t width, const FromFeaturesScratch<T>& scratch) {
  const Array& key = params.key;
  const int64_t head = at.h / (params.H / params.key_heads);
  const Rows<T> keys =
      rows_of(key, at.b * key.stride[0] + head * key.stride[1] + j0 * key.stride[2], count,
              params.F, scratch.keys);
  __builtin_memset(scratch.weights, 0, at.rows * kPanel * sizeof(T));
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t r = 0; r < at.rows; ++r) {
      scratch.weights[r * kPanel + j] = dot(scratch.queries + r * width, keys[j], width);
    }
  }
}

// Computes the sums over keys [begin, end) for some queries of one head.
template <typename T>
void attend_to_part(const FromFeaturesParams& params, const FromFeaturesPlace& at, int64_t begin,
                    int64_t end, const FromFeaturesScratch<T>& scratch, const PartialRows<T>& out) {
  const Array &value = params.value, &logits = params.logits;
  const int64_t head = at.h / (params.H / params.value_heads);
  const int64_t feature_width = round_up(params.F, kLanes<T>);
  const int64_t value_width = round_up(params.d_v, kLanes<T>);
  load_queries(params, at, feature_width, scratch.queries);
  for (int64_t r = 0; r < at.rows; ++r) {
    out.maxima[r] =
        largest_logit(logits, logits_offset(params, at, r, 0), begin, end, scratch.weights);
    out.sums[r] = 0;
  }
  __builtin_memset(out.out, 0, kRowsTogether * value_width * sizeof(T));
  for (int64_t j0 = begin; j0 < end; j0 += kPanel) {
    const int64_t count = min_of(kPanel, end - j0);
    score_keys(params, at, j0, count, feature_width, scratch);
    const Rows<T> values =
        rows_of(value, at.b * value.stride[0] + head * value.stride[1] + j0 * value.stride[2],
                count, params.d_v, scratch.values);
    for (int64_t r = 0; r < at.rows; ++r) {
      T own_logits[kPanel];
      load_row(logits, logits_offset(params, at, r, j0), logits.stride[3], count, own_logits);
      for (int64_t j = count; j < kPanel; ++j) own_logits[j] = -infinity<T>();
      const T reference = out.maxima[r] == -infinity<T>() ? T(0) : out.maxima[r];
      T* weights = scratch.weights + r * kPanel;
      out.sums[r] += weigh(own_logits, reference, static_cast<T>(params.eps), weights);
      add_values(own_logits, weights, count, values, out.out + r * value_width);
    }
  }
}

// Adds all parts of the keys of one row, in order.
template <typename T>
void finish_row(const FromFeaturesParams& params, const FromFeaturesPlace& at, int64_t row,
                int64_t parts, const PartialRows<T>* partial) {
  const int64_t value_width = round_up(params.d_v, kLanes<T>);
  T largest = -infinity<T>();
  for (int64_t part = 0; part < parts; ++part) {
    const T maximum = partial[part].maxima[row];
    largest = maximum > largest ? maximum : largest;
  }
  const T reference = largest == -infinity<T>() ? T(0) : largest;
  T* out = partial[0].out + row * value_width;
  T sum = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const PartialRows<T>& own = partial[part];
    const T maximum = own.maxima[row];
    // a part with NaN logits alone has no maximum, and its sum must stay NaN
    const T factor = exponential((maximum == -infinity<T>() ? reference : maximum) - reference);
    sum += own.sums[row] * factor;
    const T* term = own.out + row * value_width;
    for (int64_t c = 0; c < value_width; c += kLanes<T>) {
      store<T>(out + c,
               part > 0 ? load(out + c) + load(term + c) * factor : load(out + c) * factor);
    }
  }
  const T scale = sum == 0 ? T(0) : T(1) / sum;
  for (int64_t c = 0; c < value_width; ++c) out[c] *= scale;
  const Array& output = params.output;
  store_row(output,
            at.b * output.stride[0] + at.h * output.stride[1] + (at.i0 + row) * output.stride[2],
            output.stride[3], params.d_v, out);
}

template <typename T>
void attention_from_features(const FromFeaturesParams& params, const Executor& executor) {
  const int64_t blocks = ceil_div(params.L, kRowsTogether);
  const int64_t parts = max_of(1, ceil_div(params.S, kKeysTogether));
  const int64_t units = params.B * params.H * blocks;
  const int64_t feature_width = round_up(params.F, kLanes<T>);
  const int64_t value_width = round_up(params.d_v, kLanes<T>);
  FromFeaturesScratch<T>* scratch = nullptr;
  PartialRows<T>* partial = nullptr;
  const auto lay_out = [&](void* base) {
    Workspace workspace(base);
    scratch = workspace.take<FromFeaturesScratch<T>>(executor.threads);
    partial = workspace.take<PartialRows<T>>(units * parts);
    for (int thread = 0; thread < executor.threads; ++thread) {
      FromFeaturesScratch<T> own;
      own.take(workspace, feature_width, value_width);
      if (base) scratch[thread] = own;
    }
    for (int64_t task = 0; task < units * parts; ++task) {
      PartialRows<T> own;
      own.take(workspace, value_width);
      if (base) partial[task] = own;
    }
    return workspace.bytes();
  };
  lay_out(executor.allocate(executor.owner, lay_out(nullptr)));

  const auto place = [&](int64_t unit) {
    const int64_t i0 = unit % blocks * kRowsTogether;
    return FromFeaturesPlace{unit / blocks / params.H, unit / blocks % params.H, i0,
                             min_of(kRowsTogether, params.L - i0)};
  };
  parallel(executor, units * parts, [&](int64_t task, int thread) {
    const int64_t begin = task % parts * kKeysTogether;
    attend_to_part(params, place(task / parts), begin, min_of(params.S, begin + kKeysTogether),
                   scratch[thread], partial[task]);
  });
  parallel(executor, units, [&](int64_t unit, int) {
    const FromFeaturesPlace at = place(unit);
    for (int64_t row = 0; row < at.rows; ++row) {
      finish_row(params, at, row, parts, partial + unit * parts);
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
