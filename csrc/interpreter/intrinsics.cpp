// Operations of the 32 lanes of a warp together. Fragment layouts: support/cuda/intrinsics.h.
#include "support/cuda/intrinsics.h"

namespace ikattn::interpreter {

void shuffle(void* const* arguments, Place) {
  for (int lane = 0; lane < warpSize; ++lane) {
    Shuffle& own = *static_cast<Shuffle*>(arguments[lane]);
    own.result = static_cast<Shuffle*>(arguments[own.source])->bits;
  }
}

void vote(void* const* arguments, Place) {
  unsigned ballot = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    ballot |= unsigned{static_cast<Vote*>(arguments[lane])->predicate} << lane;
  }
  for (int lane = 0; lane < warpSize; ++lane) static_cast<Vote*>(arguments[lane])->ballot = ballot;
}

namespace {

struct Element {
  int row, column;
};

// The rows and columns that register i of a lane holds; 16-bit registers hold column + 1, too.
Element element_of_a16(int lane, int i) {
  return {lane / 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i / 2)};
}
Element element_of_a32(int lane, int i) { return {lane / 4 + 8 * (i % 2), lane % 4 + 4 * (i / 2)}; }
Element element_of_c(int lane, int i) { return {lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2}; }

// Adds a[16][K] b[K][8] to c[16][8], in order of k.
template <int K>
void multiply_add(const float (&a)[16][K], const float (&b)[K][8], void* const* arguments) {
  float c[16][8];
  for (int lane = 0; lane < warpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element at = element_of_c(lane, i);
      c[at.row][at.column] = static_cast<Mma*>(arguments[lane])->d[i];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const Element at = element_of_c(lane, i);
      static_cast<Mma*>(arguments[lane])->d[i] = c[at.row][at.column];
    }
  }
}

template <typename T>
void mma_16bit(void* const* arguments) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < warpSize; ++lane) {
    const Mma& own = *static_cast<Mma*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) {
      const Element at = element_of_a16(lane, i);
      const float2 pair = unpack<T>(own.a[i]);
      a[at.row][at.column] = pair.x;
      a[at.row][at.column + 1] = pair.y;
    }
    for (int i = 0; i < 2; ++i) {
      const int k = 2 * (lane % 4) + 8 * i;
      const float2 pair = unpack<T>(own.b[i]);
      b[k][lane / 4] = pair.x;
      b[k + 1][lane / 4] = pair.y;
    }
  }
  multiply_add(a, b, arguments);
}

template <bool kTransposed>
void load_four_matrices(void* const* arguments, Place place) {
  for (int lane = 0; lane < warpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      uint32_t& result = static_cast<LoadMatrices*>(arguments[lane])->registers[i];
      const auto row_address = [&](int row) {
        const LoadMatrices* names = static_cast<LoadMatrices*>(arguments[8 * i + row]);
        if (names->row_address % 16 != 0)
          fail("a row of ldmatrix is not aligned to 16 bytes", place);
        return names->row_address;
      };
      const int g = lane / 4, t = lane % 4;
      if constexpr (kTransposed) {
        for (int half = 0; half < 2; ++half) {
          const uint32_t address = row_address(2 * t + half) + 2 * g;
          const unsigned char* from = read_shared_as_lane(lane, address, 2, place);
          if (!from) return;
          memcpy(reinterpret_cast<unsigned char*>(&result) + 2 * half, from, 2);
        }
      } else {
        const unsigned char* from = read_shared_as_lane(lane, row_address(g) + 4 * t, 4, place);
        if (!from) return;
        memcpy(&result, from, 4);
      }
    }
  }
}

}  // namespace

void mma_f16(void* const* arguments, Place) { mma_16bit<Half>(arguments); }
void mma_bf16(void* const* arguments, Place) { mma_16bit<BFloat16>(arguments); }

void mma_tf32(void* const* arguments, Place) {
  float a[16][8], b[8][8];
  for (int lane = 0; lane < warpSize; ++lane) {
    const Mma& own = *static_cast<Mma*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) {
      const Element at = element_of_a32(lane, i);
      a[at.row][at.column] = tf32_part(__uint_as_float(own.a[i]));
    }
    for (int i = 0; i < 2; ++i) {
      b[lane % 4 + 4 * i][lane / 4] = tf32_part(__uint_as_float(own.b[i]));
    }
  }
  multiply_add(a, b, arguments);
}

void mma_f64(void* const* arguments, Place) {
  double a[8][4], b[4][8];
  for (int lane = 0; lane < warpSize; ++lane) {
    const MmaF64& own = *static_cast<MmaF64*>(arguments[lane]);
    a[lane / 4][lane % 4] = own.a;
    b[lane % 4][lane / 4] = own.b;
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    for (int i = 0; i < 2; ++i) {
      double& sum = static_cast<MmaF64*>(arguments[lane])->d[i];
      for (int k = 0; k < 4; ++k) sum += a[lane / 4][k] * b[k][lane % 4 * 2 + i];
    }
  }
}

void load_matrices(void* const* arguments, Place place) {
  load_four_matrices<false>(arguments, place);
}
void load_matrices_transposed(void* const* arguments, Place place) {
  load_four_matrices<true>(arguments, place);
}

}  // namespace ikattn::interpreter
