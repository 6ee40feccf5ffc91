// Conversion between moments as callers have them, a table [E, d_v + 1] of a head, and the panels
// of linear time (attention/cpu/linear/moments.h).
//
// Entry e = r F + b of a table is of psi_e(x) = x_b x_{(b + r) mod F}, r = 0 .. M, where shift M
// has b < M only; then comes the entry of the constant 1. A query counts entries from F on twice.
// The panels hold shift M in full, each of its products twice, and c_e times psi_e of a key.
#pragma once

#include "attention/cpu/linear/linear_time.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The factors of entries, powers of two, between a table and panels.
enum class Counted {
  kAsTheyAre,  // table to panels: for what is summed with c_e psi_e, once each
  kByQuery,    // table to panels: times the count of a query
  kOfKeys,     // panels to table: divided by c_e
  kOfQueries,  // panels to table: divided by c_e, times the count of a query
  kToKeys,     // the way back from kOfKeys, for sums that go on growing
  kToQueries,  // likewise from kOfQueries
};

// Tells whether panels get shift M in full, for sums of one half of it are not a whole table.
constexpr bool fills_last_shift(Counted counted) {
  return counted == Counted::kToKeys || counted == Counted::kToQueries;
}

struct Table {
  ProductLayout products;
  int64_t d_v = 0;

  // Returns the number of entries before the constant one.
  int64_t products_of_two() const { return products.features() * products.M + products.M; }
  int64_t value_panels() const { return ceil_div(d_v, kPanel); }
  // Returns the number of entries of a panel that the table has.
  int64_t rows(int64_t panel) const {
    return max_of(0, min_of(kPanel, products_of_two() - panel * kPanel));
  }
  template <typename T>
  T factor(Counted counted, int64_t e) const {
    const int64_t shift = e / products.features();
    const T of_query = shift == 0 ? T(1) : T(2);
    const T of_key = shift == 0 || shift == products.M ? T(1) : T(2);
    switch (counted) {
      case Counted::kByQuery:
        return of_query;
      case Counted::kOfKeys:
        return T(1) / of_key;
      case Counted::kOfQueries:
        return of_query / of_key;
      case Counted::kToKeys:
        return of_key;
      case Counted::kToQueries:
        return of_key / of_query;
      default:
        return T(1);
    }
  }
};

// Multiplies the entries of panel number `panel`, one of `held`.
template <typename T>
void multiply_entries(const Table& table, Counted counted, int64_t panel, const Moments<T>& held) {
  const int64_t rows =
      fills_last_shift(counted) ? table.products.entries(panel) : table.rows(panel);
  for (int64_t r = 0; r < rows; ++r) {
    const T factor = table.factor<T>(counted, panel * kPanel + r);
    if (factor == T(1)) continue;
    held.total(panel)[r] *= factor;
    for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
      T* row = held.tile(panel, of_values) + r * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) store<T>(row + c, load(row + c) * factor);
    }
  }
}

// Fills the half of shift M that a table does not have from the products of the other half.
template <typename T>
void load_last_half(const Table& table, const Array& array, int64_t offset, int64_t panel,
                    const Moments<T>& held) {
  for (int64_t r = table.rows(panel); r < table.products.entries(panel); ++r) {
    const int64_t at = offset + (panel * kPanel + r - table.products.M) * array.stride[2];
    load_panels(array, at, 0, array.stride[3], 1, table.d_v, held.tile(panel, 0) + r * kPanel,
                kPanel);
    held.total(panel)[r] = load_element<T>(array, at + table.d_v * array.stride[3]);
  }
}

// Loads panels of the table at array.data + offset, and their transposes where they are allocated.
template <typename T>
void load_table(const Table& table, const Array& array, int64_t offset, const Panels& panels,
                Counted counted, const Moments<T>& held) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t rows = table.rows(panel), at = offset + panel * kPanel * array.stride[2];
    T* tiles = held.tile(panel, 0);
    if (rows < kPanel) {  // what the table does not have counts for nothing
      const int64_t size = table.value_panels() * kPanel * kPanel;
      __builtin_memset(tiles, 0, size * sizeof(T));
      __builtin_memset(held.total(panel), 0, kPanel * sizeof(T));
    }
    load_panels(array, at, array.stride[2], array.stride[3], rows, table.d_v, tiles, kPanel);
    load_row(array, at + table.d_v * array.stride[3], array.stride[2], rows, held.total(panel));
    if (fills_last_shift(counted)) load_last_half(table, array, offset, panel, held);
    multiply_entries(table, counted, panel, held);
  }
  if (held.by_value) held.transpose(panels);
}

// The previous content of a table, which stays in it times a factor; null: it is overwritten.
template <typename T>
struct Earlier {
  T factor = 0;
  T* tiles = nullptr;  // [value panels][64][64], a copy

  template <typename Load>
  void add_to(int64_t count, T* sums, const Load& load_earlier) const {
    if (tiles == nullptr) return;
    load_earlier(tiles);
    for (int64_t i = 0; i < count; i += kLanes<T>) {
      store<T>(sums + i, load(sums + i) + load(tiles + i) * factor);
    }
  }
};

template <typename T>
void store_table(const Table& table, const Array& array, int64_t offset, const Panels& panels,
                 Counted counted, const Moments<T>& held, const Earlier<T>& earlier = {}) {
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    const int64_t rows = table.rows(panel), at = offset + panel * kPanel * array.stride[2];
    multiply_entries(table, counted, panel, held);
    earlier.add_to(table.value_panels() * kPanel * kPanel, held.tile(panel, 0), [&](T* tiles) {
      load_panels(array, at, array.stride[2], array.stride[3], rows, table.d_v, tiles, kPanel);
    });
    earlier.add_to(kPanel, held.total(panel), [&](T* tiles) {
      load_row(array, at + table.d_v * array.stride[3], array.stride[2], rows, tiles);
    });
    store_panels(array, at, array.stride[2], array.stride[3], rows, table.d_v, held.tile(panel, 0),
                 kPanel);
    store_row(array, at + table.d_v * array.stride[3], array.stride[2], rows, held.total(panel));
  }
}

// The entry of the constant 1: a sum of values, in whole vectors, and a sum of weights.
template <typename T>
struct ConstantEntry {
  T* values = nullptr;  // [value panels][64]
  T total = 0;

  void take(Workspace& workspace, const Table& table) {
    values = workspace.take<T>(table.value_panels() * kPanel);
  }
  void clear(const Table& table) {
    __builtin_memset(values, 0, table.value_panels() * kPanel * sizeof(T));
    total = 0;
  }
  // Adds rows of panels [value panels][value_rows][64] and numbers.
  void add(const Table& table, int64_t rows, const T* panels, int64_t value_rows,
           const T* numbers) {
    for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        const T* column = panels + of_values * value_rows * kPanel + c;
        Vec<T> sum{};
        for (int64_t r = 0; r < rows; ++r) sum += load(column + r * kPanel);
        T* grown = values + of_values * kPanel + c;
        store<T>(grown, load(grown) + sum);
      }
    }
    T sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += numbers[r];
    total += sum;
  }
  void load_from(const Table& table, const Array& array, int64_t offset) {
    const int64_t at = offset + table.products_of_two() * array.stride[2];
    clear(table);
    load_row(array, at, array.stride[3], table.d_v, values);
    load_row(array, at + table.d_v * array.stride[3], 1, 1, &total);
  }
  void store_to(const Table& table, const Array& array, int64_t offset, T factor,
                const Earlier<T>& earlier = {}) {
    const int64_t at = offset + table.products_of_two() * array.stride[2];
    for (int64_t c = 0; c < table.d_v; ++c) values[c] *= factor;
    earlier.add_to(table.value_panels() * kPanel, values,
                   [&](T* tiles) { load_row(array, at, array.stride[3], table.d_v, tiles); });
    if (earlier.tiles)
      total += load_element<T>(array, at + table.d_v * array.stride[3]) * earlier.factor;
    store_row(array, at, array.stride[3], table.d_v, values);
    store_element(array, at + table.d_v * array.stride[3], total * factor);
  }
};

// Fills a row of features as sums of products read it: the first M again, then zeros.
template <typename T>
void load_features(const ProductLayout& layout, const Array& array, int64_t offset, T* row) {
  const int64_t size = layout.row_size<T>(), features = layout.features();
  load_row(array, offset, array.stride[3], features, row);
  __builtin_memcpy(row + features, row, layout.M * sizeof(T));
  __builtin_memset(row + features + layout.M, 0, (size - features - layout.M) * sizeof(T));
}

// Multiplies a row of all panels, or clears it where the factor is 0, even if it holds NaN.
template <typename T>
void multiply_row(const Table& table, T factor, T* panels, int64_t panel_rows, int64_t row) {
  if (factor == T(0)) {
    fill_row(panels, panel_rows, row, table.d_v, T(0));
    return;
  }
  for (int64_t of_values = 0; of_values < table.value_panels(); ++of_values) {
    T* values = panels + (of_values * panel_rows + row) * kPanel;
    for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
      store<T>(values + c, load(values + c) * factor);
    }
  }
}

// A head of the moments, and the position of its table.
struct MomentsHead {
  int64_t b, head;
  int64_t offset(const Array& array) const { return b * array.stride[0] + head * array.stride[1]; }
};

// The scratch of a thread.
template <typename T>
struct MomentsScratch {
  ProductScratch<T> products;
  Moments<T> sums;  // of one group of panels
  ConstantEntry<T> constant;
  T* lane_sums = nullptr;  // [kProductRows][lanes]
  T* out = nullptr;        // [value panels][kProductRows][64]

  void take(Workspace& workspace, const Table& table, int64_t panels_together, bool backward) {
    products.take(workspace, table.products, table.d_v, backward);
    sums = Moments<T>::take(workspace, panels_together, table.d_v, true, false);
    constant.take(workspace, table);
    lane_sums = workspace.take<T>(kProductRows * kLanes<T>);
    out = workspace.take<T>(max_of(1, table.value_panels()) * kProductRows * kPanel);
  }
};

// The panels of a table that is read.
template <typename T>
struct HeldTable {
  Moments<T> panels;
  ConstantEntry<T> constant;

  void take(Workspace& workspace, const Table& table, bool backward) {
    panels = Moments<T>::take(workspace, table.products.panels(), table.d_v, true, backward);
    constant.take(workspace, table);
  }
};

// The division of a call among threads, and its memory: a slot for each head in progress, where
// `slots` are wanted, and a scratch for each thread.
template <typename T>
struct MomentsPlan {
  const Executor& executor;
  Table table;
  int64_t units;  // heads of the moments
  bool whole = Schedule::has_whole_units(executor, units);
  PanelGroups groups = PanelGroups::for_threads(table.products, executor.threads, whole);
  bool has_slots = false;
  HeldTable<T>* slots = nullptr;
  MomentsScratch<T>* scratch = nullptr;

  void allocate(bool wants_slots, bool backward) {
    has_slots = wants_slots;
    const int64_t count = has_slots ? Schedule::slots(executor, units, whole) : 0;
    const auto lay_out = [&](void* base) {
      Workspace workspace(base);
      slots = workspace.take<HeldTable<T>>(count);
      scratch = workspace.take<MomentsScratch<T>>(executor.threads);
      for (int64_t slot = 0; slot < count; ++slot) {
        HeldTable<T> own;
        own.take(workspace, table, backward);
        if (base) slots[slot] = own;
      }
      for (int thread = 0; thread < executor.threads; ++thread) {
        MomentsScratch<T> own;
        own.take(workspace, table, groups.together, backward);
        if (base) scratch[thread] = own;
      }
      return workspace.bytes();
    };
    lay_out(executor.allocate(executor.owner, lay_out(nullptr)));
  }
  Schedule schedule() const { return {0, units, whole}; }
};

// Returns the stage that loads a table of each head into its slot.
template <typename T, typename HeadOf>
auto load_tables(const MomentsPlan<T>& plan, const Array& array, Counted counted,
                 const HeadOf& head_of, bool is_wanted = true) {
  return Stage{is_wanted ? plan.groups.count() : 0,
               [&, counted](const Place& at, int64_t group, int) {
                 HeldTable<T>& held = plan.slots[at.slot];
                 const int64_t offset = head_of(at.unit).offset(array);
                 load_table(plan.table, array, offset, plan.groups.of(group), counted, held.panels);
                 if (group == 0) held.constant.load_from(plan.table, array, offset);
               }};
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
