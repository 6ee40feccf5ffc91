// Packed attention as calls of attention over batches, one for each group of sequences.
#include "packed_attention/groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "support/philox.h"

namespace ikattn {
namespace {

// --- Which sequences come together

std::vector<Group> runs(const Boundaries& boundaries) {
  std::vector<Group> groups;
  for (int64_t n = 0; n < boundaries.count(); ++n) {
    const int64_t L = boundaries.length(n), S = boundaries.key_count(n);
    if (groups.empty() || groups.back().L != L || groups.back().S != S)
      groups.push_back({{}, L, S});
    groups.back().sequences.push_back(n);
  }
  return groups;
}

std::vector<Group> padded(const Boundaries& boundaries, bool is_causal) {
  std::vector<int64_t> order(boundaries.count());
  std::iota(order.begin(), order.end(), 0);
  const auto sizes = [&](int64_t n) {
    return std::pair{boundaries.key_count(n), boundaries.length(n)};
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return sizes(a) > sizes(b); });
  std::vector<Group> groups;
  for (const int64_t n : order) {
    const auto [S, L] = sizes(n);
    bool joins = false;
    if (!groups.empty()) {
      const Group& last = groups.back();
      const bool is_equal = L == last.L && S == last.S;
      const bool may_be_padded = !is_causal || (L == S && last.L == last.S);
      joins = is_equal || (may_be_padded && 2 * L * S >= std::max(L, last.L) * last.S);
    }
    if (!joins) groups.push_back({{}, L, S});
    groups.back().L = std::max(groups.back().L, L);
    groups.back().sequences.push_back(n);
  }
  for (Group& group : groups) std::sort(group.sequences.begin(), group.sequences.end());
  return groups;
}

// --- Tokens of a group

// The queries or the keys of a group: rows of packed tensors [T, heads, size], and of those of the
// group, [sequences, heads, length, size].
class Rows {
 public:
  Rows(const std::vector<int64_t>& begins, const Group& group, int64_t length, at::Device device)
      : count_(static_cast<int64_t>(group.sequences.size())), length_(length) {
    const std::vector<int64_t>& numbers = group.sequences;
    first_ = begins[numbers.front()];
    const int64_t end = begins[numbers.back() + 1];
    is_run_ = numbers.back() - numbers.front() + 1 == count_ && end - first_ == count_ * length;
    for (const int64_t n : numbers) is_run_ &= begins[n + 1] - begins[n] == length;
    if (is_run_) return;
    std::vector<int64_t> rows, real;
    for (const int64_t n : numbers) {
      const int64_t last = std::max<int64_t>(begins[n + 1] - 1, 0);
      for (int64_t i = 0; i < length; ++i) {
        if (begins[n] + i < begins[n + 1]) real.push_back(static_cast<int64_t>(rows.size()));
        rows.push_back(std::min(begins[n] + i, last));  // padding is the last token once more
      }
    }
    is_padded_ = real.size() < rows.size();
    rows_ = at::tensor(rows, at::kLong).to(device);
    real_ = at::tensor(real, at::kLong).to(device);
  }

  bool is_padded() const { return is_padded_; }

  at::Tensor take(const at::Tensor& packed) const {
    const at::Tensor rows =
        is_run_ ? packed.narrow(0, first_, count_ * length_) : packed.index_select(0, rows_);
    return rows.unflatten(0, {count_, length_}).transpose(1, 2);
  }
  // Returns rows of a group without padding, in the order of the group.
  at::Tensor give(const at::Tensor& of_group) const {
    const at::Tensor rows = of_group.transpose(1, 2).flatten(0, 1);
    return is_padded_ ? rows.index_select(0, real_) : rows;
  }
  // Returns the indices of give's rows in the packed tensors.
  at::Tensor numbers(at::Device device) const {
    if (is_run_) return at::arange(first_, first_ + count_ * length_, at::device(device));
    return rows_.index_select(0, real_);
  }
  // Returns [sequences, 1, length], false for padding.
  at::Tensor is_real() const {
    return at::zeros({count_ * length_}, rows_.options().dtype(at::kBool))
        .index_fill_(0, real_, true)
        .view({count_, 1, length_});
  }

 private:
  int64_t count_, length_, first_ = 0;
  bool is_run_ = false, is_padded_ = false;
  at::Tensor rows_, real_;
};

// The results of groups, joined: [T, heads, size].
class Pieces {
 public:
  void add(const Rows& rows, const at::Tensor& of_group) {
    pieces_.push_back(rows.give(of_group));
    rows_.push_back(&rows);
  }
  at::Tensor whole(bool is_in_order) const {
    const at::Tensor all = pieces_.size() == 1 ? pieces_[0] : at::cat(pieces_);
    if (is_in_order) return all.contiguous();
    std::vector<at::Tensor> numbers;
    for (const Rows* rows : rows_) numbers.push_back(rows->numbers(all.device()));
    return at::empty_like(all, at::MemoryFormat::Contiguous).index_copy_(0, at::cat(numbers), all);
  }

 private:
  std::vector<at::Tensor> pieces_;
  std::vector<const Rows*> rows_;
};

struct GroupRows {
  Rows queries, keys;
};

std::vector<GroupRows> rows_of(const Boundaries& boundaries, const std::vector<Group>& groups,
                               at::Device device) {
  std::vector<GroupRows> rows;
  for (const Group& group : groups) {
    rows.push_back({Rows(boundaries.queries, group, group.L, device),
                    Rows(boundaries.keys, group, group.S, device)});
  }
  return rows;
}

bool are_in_order(const std::vector<Group>& groups) {
  int64_t next = 0;
  for (const Group& group : groups) {
    for (const int64_t n : group.sequences) {
      if (n != next++) return false;
    }
  }
  return true;
}

// --- Arguments of a group's call

// Returns [T_k, heads, 1] from a bias that broadcasts to [heads, T_k].
at::Tensor bias_by_token(const at::Tensor& bias, int64_t T_k) {
  const at::Tensor two = bias.dim() == 2 ? bias : bias.expand({1, bias.numel()});
  return two.expand({two.size(0), T_k}).t().unsqueeze(-1);
}

bool has_frequencies_by_sequence(const at::Tensor& w) { return w.dim() == 4 && w.size(0) > 1; }

at::Tensor frequencies_of(const at::Tensor& w, const Group& group) {
  if (!has_frequencies_by_sequence(w)) return w;
  const std::vector<int64_t>& numbers = group.sequences;
  const auto count = static_cast<int64_t>(numbers.size());
  if (numbers.back() - numbers.front() + 1 == count) return w.narrow(0, numbers.front(), count);
  return w.index_select(0, at::tensor(numbers, at::kLong).to(w.device()));
}

std::optional<at::Tensor> frequencies_of(const std::optional<at::Tensor>& w, const Group& group) {
  if (!is_present(w)) return std::nullopt;
  return frequencies_of(*w, group);
}

AttentionOptions options_of(const PackedCall& call, const Group& group, const GroupRows& rows) {
  const AttentionOptions& given = call.options;
  AttentionOptions options = given;
  options.is_causal = given.is_causal && group.L == group.S;
  if (is_present(given.key_bias)) {
    options.key_bias = rows.keys.take(bias_by_token(*given.key_bias, call.key.size(0))).squeeze(-1);
  }
  if (rows.keys.is_padded()) {
    const at::Tensor real = rows.keys.is_real();
    const at::Tensor bias = options.key_bias.value_or(
        at::zeros({}, call.query.options().dtype(compute_type(call.query.scalar_type()))));
    options.key_bias = at::where(real, bias, at::scalar_tensor(-INFINITY, bias.options()));
  }
  if (given.is_causal && group.L != group.S && group.L > 1) {
    options.attn_mask =
        at::ones({group.L, group.S}, call.query.options().dtype(at::kBool)).tril(group.S - group.L);
  }
  if (given.dropout_p > 0) {
    const int64_t place[] = {group.sequences.front(), 0, call.query.size(1), 0, 0};
    const at::Tensor numbers = at::tensor(at::ArrayRef<int64_t>(place), at::kLong);
    options.dropout_seed = at::cat({*given.dropout_seed, numbers.to(call.query.device())});
  }
  return options;
}

template <typename Attend>
PackedResults attend_each(const PackedCall& call, const Boundaries& boundaries,
                          const std::vector<Group>& groups, const Attend& attend) {
  const at::Tensor& query = call.query;
  if (groups.empty()) {
    return {at::zeros({0, query.size(1), call.value.size(2)}, query.options()),
            at::zeros({query.size(1), 0}, query.options().dtype(at::kDouble))};
  }
  const std::vector<GroupRows> rows = rows_of(boundaries, groups, query.device());
  Pieces outputs, log_normalizers;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& [queries, keys] = rows[g];
    const auto [output, log_normalizer] =
        attend(queries.take(query), keys.take(call.key), keys.take(call.value),
               frequencies_of(call.w1, groups[g]), frequencies_of(call.w2, groups[g]),
               options_of(call, groups[g], rows[g]));
    outputs.add(queries, output);
    log_normalizers.add(queries, log_normalizer.unsqueeze(-1));
  }
  const bool in_order = are_in_order(groups);
  return {outputs.whole(in_order), log_normalizers.whole(in_order).squeeze(-1).t().contiguous()};
}

// The gradient of w1 or w2: a sum over groups, or separate for each sequence.
class FrequencyGradient {
 public:
  FrequencyGradient(const at::Tensor& w, at::Device device) : w_(w) {
    const auto wide = at::TensorOptions().device(device).dtype(compute_type(w.scalar_type()));
    sum_ = at::zeros(w.sizes(), wide);
  }
  void add(const Group& group, const at::Tensor& of_group) {
    if (has_frequencies_by_sequence(w_)) {
      sum_.index_copy_(0, at::tensor(group.sequences, at::kLong).to(sum_.device()),
                       of_group.to(sum_.scalar_type()));
    } else {
      sum_ += of_group;
    }
  }
  at::Tensor whole() const { return sum_.to(w_.scalar_type()); }

 private:
  at::Tensor w_, sum_;
};

}  // namespace

std::vector<Group> groups_of(const Boundaries& boundaries, Grouping grouping, bool is_causal) {
  return grouping == Grouping::kRuns ? runs(boundaries) : padded(boundaries, is_causal);
}

PackedResults attend_groups(const PackedCall& call, const Boundaries& boundaries,
                            const std::vector<Group>& groups) {
  return attend_each(call, boundaries, groups, call_attention);
}

PackedGradients gradients_of_groups(const at::Tensor& grad_output, const PackedResults& results,
                                    const PackedCall& call, const Boundaries& boundaries,
                                    const std::vector<Group>& groups, PackedWanted wanted) {
  const at::Tensor& query = call.query;
  const auto& [output, log_normalizer] = results;
  const at::Tensor normalizer_by_token = log_normalizer.t().unsqueeze(-1);
  const std::vector<GroupRows> rows = rows_of(boundaries, groups, query.device());
  const std::array<bool, kAttentionGradients> each = {wanted[0], wanted[1], wanted[2], wanted[3],
                                                      wanted[4], wanted[5], false};
  // Frequencies are widened, for a sum over groups must not round to 16 bits each time.
  const auto wide = [](const at::Tensor& w) { return w.to(compute_type(w.scalar_type())); };
  PackedCall wide_call = call;
  wide_call.w1 = wide(call.w1);
  if (is_present(call.w2)) wide_call.w2 = wide(*call.w2);
  FrequencyGradient of_w1(call.w1, query.device()), of_w2(call.w1, query.device());
  Pieces of_query, of_key, of_value, of_bias;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& [queries, keys] = rows[g];
    at::Tensor grad = queries.take(grad_output);
    if (queries.is_padded()) {
      grad = at::where(queries.is_real().unsqueeze(-1), grad, at::zeros({}, grad.options()));
    }
    const auto [q, k, v, w1, w2, bias, mask] = call_attention_backward(
        grad, queries.take(query), keys.take(call.key), keys.take(call.value),
        frequencies_of(wide_call.w1, groups[g]), frequencies_of(wide_call.w2, groups[g]),
        queries.take(output), queries.take(normalizer_by_token).squeeze(-1),
        options_of(call, groups[g], rows[g]), each);
    if (wanted[0]) of_query.add(queries, q);
    if (wanted[1]) of_key.add(keys, k);
    if (wanted[2]) of_value.add(keys, v);
    if (wanted[3]) of_w1.add(groups[g], w1);
    if (wanted[4]) of_w2.add(groups[g], w2);
    if (wanted[5]) of_bias.add(keys, bias.unsqueeze(-1));
  }
  const bool in_order = are_in_order(groups);
  const auto whole = [&](bool is_wanted, const Pieces& pieces, const at::Tensor& like) {
    if (!is_wanted) return at::empty({0}, query.options());
    return groups.empty() ? at::zeros_like(like) : pieces.whole(in_order);
  };
  at::Tensor grad_bias = at::empty({0}, query.options());
  if (wanted[5]) {
    const at::Tensor& bias = *call.options.key_bias;
    grad_bias = whole(true, of_bias, bias_by_token(bias, call.key.size(0))).squeeze(-1).t();
    grad_bias = at::sum_to(grad_bias, bias.sizes()).contiguous();
  }
  const at::Tensor none = at::empty({0}, query.options());
  return {whole(wanted[0], of_query, query),      whole(wanted[1], of_key, call.key),
          whole(wanted[2], of_value, call.value), wanted[3] ? of_w1.whole() : none,
          wanted[4] ? of_w2.whole() : none,       grad_bias};
}

PackedResults reference_packed_attention(const PackedCall& call) {
  const Boundaries boundaries = boundaries_of(kPackedAttention, call);
  return attend_each(call, boundaries, groups_of(boundaries, Grouping::kRuns, false),
                     [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                        const AttentionOptions& options) {
                       return reference_attention(query, key, value, w1, w2, options);
                     });
}

}  // namespace ikattn
