// AMX for processors without it: a library to preload, which lets the process believe that it has
// AMX and does what the instructions would when they trap. The kernels run as compiled; slow, for
// tests. It does the instructions of csrc/support/cpu/amx.h, on x86-64 Linux:
//
//   ldtilecfg  tilerelease  tilezero  tileloadd  tilestored  tdpbf16ps
//
// and ends the process, with a sentence, at what the processor would not do: a tile without a
// configuration, shapes that do not fit each other, another instruction that traps. When the
// process ends it writes to the file that IKATTN_IMITATED_AMX names how many products it has done,
// and the palette that the main thread is left with: 0 if it has given back its tiles.
//
// After Intel's Software Developer's Manual, volume 2: "Intel Advanced Matrix Extensions" and
// TDPBF16PS (bfloat16 times bfloat16 is exact in float32; even and odd numbers of a row are summed
// apart, rounded to nearest, denormals taken for zero; then both sums are added to the result).
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <initializer_list>

namespace {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Configuration {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

struct Tiles {
  Configuration shapes;
  uint8_t data[kTiles][kRows][kRowBytes];
};
// Tiles of the thread; in static storage, for a signal handler must not allocate.
__attribute__((tls_model("initial-exec"))) thread_local Tiles tiles;

long products = 0;

[[noreturn]] void fail(const char* reason) {
  constexpr char kWho[] = "imitated AMX: ";
  (void)!write(STDERR_FILENO, kWho, sizeof(kWho) - 1);
  (void)!write(STDERR_FILENO, reason, strlen(reason));
  (void)!write(STDERR_FILENO, "\n", 1);
  _exit(134);
}

void load_configuration(const void* memory) {
  Configuration shapes;
  memcpy(&shapes, memory, sizeof(shapes));
  if (shapes.palette > 1 || shapes.start_row != 0) fail("ldtilecfg: palette or first row");
  for (const uint8_t byte : shapes.reserved) {
    if (byte != 0) fail("ldtilecfg: a reserved byte is not zero");
  }
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shapes.rows[tile], bytes = shapes.row_bytes[tile];
    if ((rows == 0) != (bytes == 0)) fail("ldtilecfg: rows without bytes, or the reverse");
    if (rows > (tile < kTiles ? kRows : 0) || bytes > kRowBytes) fail("ldtilecfg: too large");
  }
  memset(&tiles, 0, sizeof(tiles));
  if (shapes.palette == 1) tiles.shapes = shapes;
}

void check(int tile) {
  if (tiles.shapes.palette != 1) fail("a tile is used where none is configured");
  if (tile >= kTiles || tiles.shapes.rows[tile] == 0) fail("a tile is used that has no rows");
}

// Data past the rows and bytes that a tile has are zero.
void load_tile(int tile, const uint8_t* memory, int64_t stride) {
  check(tile);
  memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
  for (int r = 0; r < tiles.shapes.rows[tile]; ++r) {
    memcpy(tiles.data[tile][r], memory + r * stride, tiles.shapes.row_bytes[tile]);
  }
}

void store_tile(int tile, uint8_t* memory, int64_t stride) {
  check(tile);
  for (int r = 0; r < tiles.shapes.rows[tile]; ++r) {
    memcpy(memory + r * stride, tiles.data[tile][r], tiles.shapes.row_bytes[tile]);
  }
}

float number(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

void multiply_tiles(int sum, int left, int right) {
  for (const int tile : {sum, left, right}) check(tile);
  if (sum == left || sum == right || left == right) fail("tdpbf16ps: a tile is named twice");
  const Configuration& shapes = tiles.shapes;
  if (shapes.rows[sum] != shapes.rows[left] || shapes.row_bytes[sum] != shapes.row_bytes[right] ||
      shapes.row_bytes[left] != 4 * shapes.rows[right]) {
    fail("tdpbf16ps: the shapes do not fit");
  }
  const unsigned before = _mm_getcsr();
  constexpr unsigned kDefault = 0x1f80, kDenormalsAreZero = 0x40, kFlushToZero = 0x8000;
  _mm_setcsr(kDefault | kDenormalsAreZero | kFlushToZero);
  for (int r = 0; r < shapes.rows[sum]; ++r) {
    float even[kRowBytes / 4] = {}, odd[kRowBytes / 4] = {}, total[kRowBytes / 4];
    for (int k = 0; k < shapes.rows[right]; ++k) {
      uint32_t a, b[kRowBytes / 4];
      memcpy(&a, tiles.data[left][r] + 4 * k, 4);
      memcpy(b, tiles.data[right][k], kRowBytes);
      const float low = number(a << 16), high = number(a & 0xffff0000);
      for (int c = 0; c < kRowBytes / 4; ++c) {
        even[c] = __builtin_fmaf(low, number(b[c] << 16), even[c]);
        odd[c] = __builtin_fmaf(high, number(b[c] & 0xffff0000), odd[c]);
      }
    }
    memcpy(total, tiles.data[sum][r], kRowBytes);
    for (int c = 0; c < kRowBytes / 4; ++c) total[c] += even[c] + odd[c];
    memcpy(tiles.data[sum][r], total, kRowBytes);
  }
  _mm_setcsr(before);
  __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
}

// An instruction with a three-byte VEX prefix, from its opcode on.
class Instruction {
 public:
  Instruction(const uint8_t* code, const greg_t* registers) : code_(code), registers_(registers) {
    if (code[0] != 0xc4) fail("an instruction that is not AMX's has trapped");
    modrm_ = code[4];
    length_ = 5;
    if (!is_of_registers()) read_address();
  }

  int map() const { return code_[1] & 31; }
  int prefix() const { return code_[2] & 3; }  // 0: none, 1: 66, 2: F3, 3: F2
  int opcode() const { return code_[3]; }
  int length() const { return length_; }
  bool is_of_registers() const { return modrm_ >> 6 == 3; }
  int reg() const { return (modrm_ >> 3 & 7) | extension(7) << 3; }
  int rm() const { return (modrm_ & 7) | extension(5) << 3; }
  int other() const { return ~code_[2] >> 3 & 15; }
  uint8_t* memory() const { return reinterpret_cast<uint8_t*>(base_ + index_); }
  uint8_t* rows() const { return reinterpret_cast<uint8_t*>(base_); }
  int64_t stride() const { return index_; }

 private:
  int extension(int bit) const { return ~code_[1] >> bit & 1; }
  int64_t general(int number) const {
    constexpr int kPlaces[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                 REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                 REG_R12, REG_R13, REG_R14, REG_R15};
    return registers_[kPlaces[number]];
  }
  template <typename T>
  T displacement() {
    T value;
    memcpy(&value, code_ + length_, sizeof(value));
    length_ += sizeof(value);
    return value;
  }
  void read_address() {
    const int mode = modrm_ >> 6;
    if ((modrm_ & 7) == 4) {
      const int sib = code_[length_++];
      const int base = (sib & 7) | extension(5) << 3, index = (sib >> 3 & 7) | extension(6) << 3;
      const bool has_base = mode != 0 || (base & 7) != 5;
      base_ = has_base ? general(base) : displacement<int32_t>();
      if (index != 4) index_ = general(index) * (int64_t{1} << (sib >> 6));
    } else if (mode == 0 && (modrm_ & 7) == 5) {  // relative to the next instruction
      const int32_t distance = displacement<int32_t>();
      base_ = reinterpret_cast<int64_t>(code_) + length_ + distance;
    } else {
      base_ = general(rm());
    }
    if (mode == 1) base_ += displacement<int8_t>();
    if (mode == 2) base_ += displacement<int32_t>();
  }

  const uint8_t* code_;
  const greg_t* registers_;
  int modrm_, length_;
  int64_t base_ = 0, index_ = 0;
};

void execute(const Instruction& it) {
  if (it.map() != 2) fail("an instruction that is not AMX's has trapped");
  const int which = it.opcode() << 4 | it.prefix();
  if (which == 0x490 && it.is_of_registers()) {
    memset(&tiles, 0, sizeof(tiles));  // tilerelease
  } else if (which == 0x490) {
    load_configuration(it.memory());
  } else if (which == 0x493 && it.is_of_registers()) {
    check(it.reg());
    memset(tiles.data[it.reg()], 0, sizeof(tiles.data[0]));  // tilezero
  } else if (which == 0x4b3 && !it.is_of_registers()) {
    load_tile(it.reg(), it.rows(), it.stride());
  } else if (which == 0x4b2 && !it.is_of_registers()) {
    store_tile(it.reg(), it.rows(), it.stride());
  } else if (which == 0x5c2 && it.is_of_registers()) {
    multiply_tiles(it.reg(), it.rm(), it.other());
  } else {
    fail("an instruction of AMX that is not imitated");
  }
}

void on_trap(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction it(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  execute(it);
  registers[REG_RIP] += it.length();
}

struct Imitation {
  Imitation() {
    struct sigaction action = {};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (sigaction(SIGILL, &action, nullptr) != 0) fail("no handler could be set");
  }
  ~Imitation() {
    const char* name = getenv("IKATTN_IMITATED_AMX");
    FILE* file = name ? fopen(name, "w") : nullptr;
    if (!file) return;
    fprintf(file, "%ld %d\n", products, tiles.shapes.palette);
    fclose(file);
  }
} imitation;

}  // namespace

// torch's own, in place of which this one is found.
namespace at::cpu {
__attribute__((visibility("default"))) bool init_amx() { return true; }
}  // namespace at::cpu
