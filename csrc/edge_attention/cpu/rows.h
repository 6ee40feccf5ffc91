// Sums over the edges of every node, in parallel. A row is a node with its incoming or outgoing
// edges. Rows are cut independently of the threads, and so are the bits.
#pragma once

#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The number of edges of a task. Short rows are grouped into tasks of about as many; a longer row
// is cut into pieces of as many, whose partial sums are added in order.
constexpr int64_t kPieceEdges = 1024;

inline int64_t pieces_of(int64_t edges) { return ceil_div(edges, kPieceEdges); }

// The sums over the edges of a row, or of a piece of it.
template <typename T>
struct Partial {
  double* numbers;
  T* values;
};

struct PartialSizes {
  int64_t numbers, values;
};

struct Rows {
  const int64_t* ends;  // [count + 1]: edges ends[row] .. ends[row + 1] - 1
  int64_t count;

  int64_t edges(int64_t row) const { return ends[row + 1] - ends[row]; }
  bool is_long(int64_t row) const { return edges(row) > kPieceEdges; }

  // Returns the number of pieces of all long rows.
  int64_t pieces() const {
    int64_t sum = 0;
    for (int64_t row = 0; row < count; ++row) {
      if (is_long(row)) sum += pieces_of(edges(row));
    }
    return sum;
  }

  // Returns the first row with at least `bound` rows and edges before it.
  int64_t at(int64_t bound) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ends[middle] + middle < bound) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Slots for partial sums: one for every thread, and one for every piece of a long row.
template <typename T>
class Partials {
 public:
  Partials(Workspace& workspace, const Rows& rows, int threads, PartialSizes sizes)
      : sizes_(sizes), threads_(threads), pieces_(rows.pieces()) {
    numbers_ = workspace.take<double>((threads + pieces_) * sizes.numbers);
    values_ = workspace.take<T>((threads + pieces_) * sizes.values);
    row_of_ = workspace.take<int64_t>(pieces_);
    first_of_ = workspace.take<int64_t>(pieces_);
    if (!workspace.has_memory() || pieces_ == 0) return;
    int64_t piece = 0;
    for (int64_t row = 0; row < rows.count; ++row) {
      if (!rows.is_long(row)) continue;
      const int64_t first = piece;
      for (; piece < first + pieces_of(rows.edges(row)); ++piece) {
        row_of_[piece] = row;
        first_of_[piece] = first;
      }
    }
  }

  Partial<T> operator[](int64_t slot) const {
    return {numbers_ + slot * sizes_.numbers, values_ + slot * sizes_.values};
  }
  // Adds the other slots of a row to its first, where partial sums are plain sums.
  Partial<T> total(int64_t first, int64_t slots) const {
    const Partial<T> sum = (*this)[first];
    for (int64_t slot = first + 1; slot < first + slots; ++slot) {
      const Partial<T> other = (*this)[slot];
      for (int64_t k = 0; k < sizes_.numbers; ++k) sum.numbers[k] += other.numbers[k];
      for (int64_t k = 0; k < sizes_.values; ++k) sum.values[k] += other.values[k];
    }
    return sum;
  }

  int64_t pieces() const { return pieces_; }
  int64_t slot_of(int64_t piece) const { return threads_ + piece; }
  int64_t row_of(int64_t piece) const { return row_of_[piece]; }
  int64_t first_of(int64_t piece) const { return first_of_[piece]; }  // of the same row

 private:
  PartialSizes sizes_;
  int64_t threads_, pieces_;
  double* numbers_;
  T* values_;
  int64_t *row_of_, *first_of_;
};

// Calls sum(row, begin, end, partial, thread) for the edges of every row, whole or piece by piece,
// then finish(row, first slot, slots) with the slots of its pieces.
template <typename T, typename Sum, typename Finish>
inline void for_rows(const Rows& rows, const Partials<T>& partials, const Executor& executor,
                     const Sum& sum, const Finish& finish) {
  // A row without edges costs about as much as an edge.
  const int64_t work = rows.ends[rows.count] + rows.count;
  const int64_t tasks = ceil_div(work, kPieceEdges);
  parallel(executor, tasks, [&](int64_t task, int thread) {
    const int64_t last = task + 1 == tasks ? rows.count : rows.at((task + 1) * kPieceEdges);
    for (int64_t row = rows.at(task * kPieceEdges); row < last; ++row) {
      if (rows.is_long(row)) continue;
      sum(row, rows.ends[row], rows.ends[row + 1], partials[thread], thread);
      finish(row, thread, 1);
    }
  });
  parallel(executor, partials.pieces(), [&](int64_t piece, int thread) {
    const int64_t row = partials.row_of(piece);
    const int64_t begin = rows.ends[row] + (piece - partials.first_of(piece)) * kPieceEdges;
    const int64_t end = min_of(begin + kPieceEdges, rows.ends[row + 1]);
    sum(row, begin, end, partials[partials.slot_of(piece)], thread);
  });
  parallel(executor, partials.pieces(), [&](int64_t piece, int) {
    if (partials.first_of(piece) != piece) return;
    const int64_t row = partials.row_of(piece);
    finish(row, partials.slot_of(piece), pieces_of(rows.edges(row)));
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
