// Norms of all pairs of dot attention whose weights are never all in memory.
//
// A task makes the weights of some queries and all heads and keys, and at once their norms. Scores
// of a head stay in the second-level cache until its softmax is done; norms then read the weights
// of a block of keys in place. Keys and values are packed once, for all tasks.
#pragma once

#include "contributions/cpu/pairs.h"
#include "contributions/cpu/vectors.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kMostStreamedRows = 32;

// Returns the number of queries whose weights a task makes: more read keys less often, but their
// weights should stay near the caches, and every thread should have some.
template <typename T>
int64_t streamed_rows(const StreamedPairParams& params, int64_t threads) {
  constexpr int64_t kBytes = int64_t{1} << 24;
  const int64_t bytes_each = params.H * params.S * static_cast<int64_t>(sizeof(T));
  int64_t rows = kMostStreamedRows;
  while (rows > 8 && (rows * bytes_each > kBytes ||
                      (threads > 1 && params.B * ceil_div(params.rows, rows) < 2 * threads))) {
    rows /= 2;
  }
  return rows;
}

// Copies tokens [B, heads, S, size] as panels [B][heads][blocks][size / 64][64][64]: a block of
// tokens by rows or, for `is_transposed`, by columns.
template <typename T>
void pack_tokens(const Executor& executor, const Array& tokens, int64_t B, int64_t heads, int64_t S,
                 int64_t size, bool is_transposed, T* packed, T* scratch, int64_t scratch_size) {
  const int64_t blocks = ceil_div(S, kPanel), panels = ceil_div(size, kPanel);
  parallel(executor, B * heads * blocks, [&](int64_t task, int thread) {
    const int64_t block = task % blocks, b = task / blocks / heads, g = task / blocks % heads;
    const int64_t count = min_of(kPanel, S - block * kPanel);
    const int64_t* stride = tokens.stride;
    T* target = packed + task * panels * kPanelSize;
    T* rows = is_transposed ? scratch + thread * scratch_size : target;
    load_panels(tokens, b * stride[0] + g * stride[1] + block * kPanel * stride[2], stride[2],
                stride[3], count, size, rows, kPanel);
    for (int64_t k = 0; is_transposed && k < panels; ++k) {
      transpose_panel(count, min_of(kPanel, size - k * kPanel), rows + k * kPanelSize,
                      target + k * kPanelSize);
    }
  });
}

template <typename T>
class StreamedPairs {
 public:
  StreamedPairs(Workspace& workspace, const StreamedPairParams& params, int64_t rows)
      : params_(params),
        blocks_(ceil_div(params.S, kPanel)),
        block_rows_(rows),
        weights_(workspace.take<T>(params.H * blocks_ * rows * kPanel)),
        query_(workspace.take<T>(rows * round_up(params.d, kPanel))),
        others_(workspace.take<T>(rows * round_up(params.d_v, kPanel))),
        norms_(workspace.take<T>(kRowGroup * kPanel)) {}

  // Computes the pairs of the queries [first, first + rows) of item b.
  //   keys, values: as pack_tokens() leaves them
  void operator()(const NormsOfHeads<T>& kernels, int64_t b, int64_t first, int64_t rows,
                  const T* keys, const T* values) {
    const int64_t seen =
        params_.is_causal ? min_of(blocks_, ceil_div(first + rows, kPanel)) : blocks_;
    for (int64_t m = 0; m < rows; ++m) is_broken_[m] = false;
    for (int64_t h = 0; h < params_.H; ++h) {
      score(b, h, first, rows, seen, keys);
      normalise(b, h, first, rows, seen);
      if (params_.own) copy_own(b, h, first, rows);
      if (params_.key_padding) hide_padding(b, h, rows, seen);
      if (params_.others) sum_others(b, h, first, rows, seen, values);
    }
    const int64_t step = kernels.several ? kernels.rows : kRowGroup;
    for (int64_t block = 0; block < seen; ++block) {
      const int64_t ahead = block + 1 < seen ? block_rows_ * kPanel : 0;
      for (int64_t m = 0; m < rows; m += step) {
        const WeightBlock<T> weights{scores(0, block) + m * kPanel, blocks_ * block_rows_ * kPanel,
                                     kPanel, ahead};
        store_block(params_, kernels, weights, b, first + m, min_of(step, rows - m), block, norms_);
      }
    }
    for (int64_t block = seen; block < blocks_; ++block) {
      for (int64_t m = 0; m < rows; ++m) store_hidden(b, first + m, block, is_broken_[m]);
    }
  }

 private:
  T* scores(int64_t h, int64_t block) const {
    return weights_ + (h * blocks_ + block) * block_rows_ * kPanel;
  }

  // Tells whether a query may see no key; else its logits are all -inf for want of range.
  bool hides_keys() const { return params_.is_causal || params_.mask || params_.key_bias; }

  // Computes the logits of one head, [blocks][rows][64], and the largest of each row and lane.
  void score(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t seen, const T* keys) {
    const int64_t* stride = params_.query.stride;
    const int64_t panels = ceil_div(params_.d, kPanel);
    load_panels(params_.query, b * stride[0] + h * stride[1] + first * stride[2], stride[2],
                stride[3], rows, params_.d, query_, block_rows_);
    const T scale = static_cast<T>(params_.scale);
    for (int64_t k = 0; k < panels; ++k) {
      T* panel = query_ + k * block_rows_ * kPanel;
      for (int64_t c = 0; c < rows * kPanel; ++c) panel[c] *= scale;
    }
    for (int64_t m = 0; m < rows; ++m) largest_[m] = Vec<T>{} - infinity<T>();
    const int64_t group = h / (params_.H / params_.G);
    keys += (b * params_.G + group) * blocks_ * panels * kPanelSize;
    for (int64_t block = 0; block < seen; ++block, keys += panels * kPanelSize) {
      const int64_t count = min_of(kPanel, params_.S - block * kPanel);
      T* logits = scores(h, block);
      for (int64_t k = 0; k == 0 || k < panels; ++k) {
        panel_gemm<T, Left::kRows>(rows, count, min_of(kPanel, params_.d - k * kPanel),
                                   query_ + k * block_rows_ * kPanel, keys + k * kPanelSize, logits,
                                   k > 0);
      }
      add_terms(b, h, first, rows, block, logits);
      for (int64_t m = 0; m < rows; ++m) {
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
          const Vec<T> x = load(logits + m * kPanel + c);
          largest_[m] = x > largest_[m] ? x : largest_[m];  // leaves NaN out
        }
      }
    }
  }

  // Adds bias and mask to the logits [rows][64] of a block, -inf where a key is hidden or beyond S.
  void add_terms(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t block,
                 T* logits) const {
    const int64_t j0 = block * kPanel, count = min_of(kPanel, params_.S - j0);
    const bool has_terms = params_.mask || params_.key_bias;
    if (!has_terms && count == kPanel && !params_.is_causal) return;
    for (int64_t m = 0; m < rows; ++m) {
      T* row = logits + m * kPanel;
      if (has_terms) {
        T terms[kPanel] = {};
        if (params_.key_bias) load_term(params_.key_bias, b, h, 0, j0, count, terms);
        if (params_.mask) load_mask(b, h, first + m, j0, count, terms);
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
          const Vec<T> term = load(terms + c), lowest = Vec<T>{} - infinity<T>();
          store(row + c, term == lowest ? lowest : load(row + c) + term);
        }
      }
      const int64_t end = params_.is_causal ? min_of(count, first + m + 1 - j0) : count;
      for (int64_t c = max_of(end, 0); c < kPanel; ++c) row[c] = -infinity<T>();
    }
  }

  static void load_term(const Array& array, int64_t b, int64_t h, int64_t i, int64_t j,
                        int64_t count, T* terms) {
    const int64_t* stride = array.stride;
    load_row(array, b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3], stride[3], count,
             terms);
  }

  // Adds the mask's row of query i to `terms`.
  void load_mask(int64_t b, int64_t h, int64_t i, int64_t j, int64_t count, T* terms) const {
    const Array& mask = params_.mask;
    if (mask.type != ElementType::kBool) {
      T added[kPanel];
      load_term(mask, b, h, i, j, count, added);
      for (int64_t c = 0; c < count; ++c) {
        const bool hides = terms[c] == -infinity<T>() || added[c] == -infinity<T>();
        terms[c] = hides ? -infinity<T>() : terms[c] + added[c];
      }
      return;
    }
    const int64_t* stride = mask.stride;
    const uint8_t* visible = static_cast<const uint8_t*>(mask.data) + b * stride[0] +
                             h * stride[1] + i * stride[2] + j * stride[3];
    for (int64_t c = 0; c < count; ++c) {
      terms[c] = visible[c * stride[3]] != 0 ? terms[c] : -infinity<T>();
    }
  }

  // Turns the logits of one head into weights. A query that sees no key, or is padding, has none.
  void normalise(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t seen) {
    for (int64_t m = 0; m < rows; ++m) {
      const bool counts = !is_padding(params_.query_padding, b, first + m);
      const T largest = max_of_lanes<T>(largest_[m]), shift = is_finite(largest) ? largest : T(0);
      T sum = 0;
      for (int64_t block = 0; counts && block < seen; ++block) {
        T* row = scores(h, block) + m * kPanel;
        Vec<T> sums{};
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
          const Vec<T> x = exp_bounded<T>(load(row + c) - shift);
          store(row + c, x);
          sums += x;
        }
        sum += sum_of_lanes<T>(sums);
      }
      // as the difference of infinities
      const bool is_lost = largest == infinity<T>() || (largest == -infinity<T>() && !hides_keys());
      if (counts && is_lost) sum = not_a_number<T>();
      const T factor = sum == T(0) ? T(0) : T(1) / sum;
      is_broken_[m] |= factor != factor;
      for (int64_t block = 0; block < seen; ++block) {
        T* row = scores(h, block) + m * kPanel;
        for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
          store(row + c, counts ? load(row + c) * factor : Vec<T>{});
        }
      }
    }
    for (int64_t block = 0; block < seen; ++block) {  // what looped_norms() reads beyond
      T* rest = scores(h, block) + rows * kPanel;
      for (int64_t c = 0; c < (round_up(rows, kRowGroup) - rows) * kPanel; ++c) rest[c] = 0;
    }
  }

  // Returns the weight of query i's own key; nullptr: the key is hidden by causality.
  T* own_weight(int64_t h, int64_t first, int64_t m, int64_t seen) const {
    const int64_t j = first + m + params_.diagonal;
    return j < seen * kPanel ? scores(h, j / kPanel) + m * kPanel + j % kPanel : nullptr;
  }

  void copy_own(int64_t b, int64_t h, int64_t first, int64_t rows) const {
    const int64_t seen =
        params_.is_causal ? min_of(blocks_, ceil_div(first + rows, kPanel)) : blocks_;
    T* own = static_cast<T*>(params_.own) + (b * params_.H + h) * params_.rows + first;
    for (int64_t m = 0; m < rows; ++m) {
      const T* weight = own_weight(h, first, m, seen);
      own[m] = weight ? *weight : is_broken_[m] ? not_a_number<T>() : T(0);
    }
  }

  void hide_padding(int64_t b, int64_t h, int64_t rows, int64_t seen) const {
    for (int64_t j = 0; j < min_of(params_.S, seen * kPanel); ++j) {
      if (!is_padding(params_.key_padding, b, j)) continue;
      T* column = scores(h, j / kPanel) + j % kPanel;
      for (int64_t m = 0; m < rows; ++m) column[m * kPanel] = 0;
    }
  }

  // Sums the values of all keys but the own ones; NaN where one that counts is not finite.
  void sum_others(int64_t b, int64_t h, int64_t first, int64_t rows, int64_t seen,
                  const T* values) const {
    const int64_t panels = ceil_div(params_.d_v, kPanel);
    const int64_t group = h / (params_.H / params_.value_heads);
    values += (b * params_.value_heads + group) * blocks_ * panels * kPanelSize;
    T own[kMostStreamedRows];
    for (int64_t m = 0; m < rows; ++m) {
      T* weight = own_weight(h, first, m, seen);
      if (!weight) continue;
      own[m] = *weight;
      *weight = 0;
    }
    for (int64_t block = 0; block < seen; ++block, values += panels * kPanelSize) {
      const int64_t count = min_of(kPanel, params_.S - block * kPanel);
      for (int64_t k = 0; k < panels; ++k) {
        panel_gemm<T, Left::kRows>(rows, min_of(kPanel, params_.d_v - k * kPanel), count,
                                   scores(h, block), values + k * kPanelSize,
                                   others_ + k * block_rows_ * kPanel, block > 0);
      }
    }
    for (int64_t j = 0; params_.broken && j < min_of(params_.S, seen * kPanel); ++j) {
      const int64_t* stride = params_.broken.stride;
      const int64_t offset = b * stride[0] + group * stride[1] + j * stride[2];
      if (load_element<T>(params_.broken, offset) == 0) continue;
      const T* column = scores(h, j / kPanel) + j % kPanel;
      for (int64_t m = 0; m < rows; ++m) {
        if (column[m * kPanel] == 0) continue;
        fill_row(others_, block_rows_, m, params_.d_v, not_a_number<T>());
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      if (T* weight = own_weight(h, first, m, seen)) *weight = own[m];
    }
    const int64_t* stride = params_.others.stride;
    store_panels(params_.others, b * stride[0] + h * stride[1] + first * stride[2], stride[2],
                 stride[3], rows, params_.d_v, others_, block_rows_);
  }

  // Stores the norms of a block of keys that causality hides from query i: 0, NaN where a weight of
  // the query is NaN.
  void store_hidden(int64_t b, int64_t i, int64_t block, bool is_broken) const {
    const int64_t j0 = block * kPanel, count = min_of(kPanel, params_.S - j0);
    for (int64_t c = 0; c < count; ++c) {
      const bool is_zero = !is_broken || is_padding(params_.key_padding, b, j0 + c);
      norms_[c] = is_zero ? T(0) : not_a_number<T>();
    }
    for (int v = 0; v < params_.variants; ++v) {
      const Array& out = params_.norms[v];
      store_row(out, b * out.stride[0] + i * out.stride[1] + j0 * out.stride[2], out.stride[2],
                count, norms_);
    }
  }

  const StreamedPairParams& params_;
  int64_t blocks_, block_rows_;
  T *weights_, *query_, *others_,
      *norms_;  // [H][blocks][rows][64]; panels of rows; [kRowGroup][64]
  Vec<T> largest_[kMostStreamedRows];
  bool is_broken_[kMostStreamedRows];
};

template <typename T>
void streamed_norms(const StreamedPairParams& params, const Executor& executor) {
  const int64_t blocks = ceil_div(params.S, kPanel);
  const int64_t rows = streamed_rows<T>(params, executor.threads);
  const NormsOfHeads<T> kernels = norms_of_heads<T>(params.H);
  const int64_t key_panels = ceil_div(params.d, kPanel);
  const int64_t value_panels = params.others ? ceil_div(params.d_v, kPanel) : 0;
  const auto take_shared = [&](Workspace& workspace, T*& keys, T*& values) {
    keys = workspace.take<T>(params.B * params.G * blocks * key_panels * kPanelSize);
    values = workspace.take<T>(params.B * params.value_heads * blocks * value_panels * kPanelSize);
  };
  T *keys, *values;
  Workspace shared, of_task;
  take_shared(shared, keys, values);
  static_cast<void>(StreamedPairs<T>(of_task, params, rows));
  const int64_t task_bytes = max_of(
      of_task.bytes(), round_up(key_panels * kPanelSize * static_cast<int64_t>(sizeof(T)), 64));
  char* memory = static_cast<char*>(
      executor.allocate(executor.owner, shared.bytes() + task_bytes * max_of(1, executor.threads)));
  Workspace whole(memory);
  take_shared(whole, keys, values);
  memory += shared.bytes();

  pack_tokens(executor, params.key, params.B, params.G, params.S, params.d, true, keys,
              reinterpret_cast<T*>(memory), task_bytes / static_cast<int64_t>(sizeof(T)));
  if (params.others) {
    pack_tokens<T>(executor, params.value, params.B, params.value_heads, params.S, params.d_v,
                   false, values, nullptr, 0);
  }
  const int64_t row_blocks = ceil_div(params.rows, rows);
  parallel(executor, params.B * row_blocks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * task_bytes);
    StreamedPairs<T> pairs(workspace, params, rows);
    const int64_t first = task % row_blocks * rows;
    pairs(kernels, task / row_blocks, first, min_of(rows, params.rows - first), keys, values);
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
