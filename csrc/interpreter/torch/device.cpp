// The torch device "interpreter": tensors in the memory of the CPU that torch takes for another
// device's. ikattn's operators run its CUDA kernels there, in the interpreter; torch's run on
// copies.
//
// Read from the environment: IKATTN_INTERPRETER_HOPPER, 1: the kernels for Hopper alone;
// IKATTN_INTERPRETER_MULTIPROCESSORS, how many the device says it has, 1 if it is not there.
//
// New memory is NaNs, and what is written before or behind it ends the process. There is as much as
// torch.ops.ikattn_interpreter.limit_memory has said last.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "interpreter/interpreter.h"
#include "support/cuda/glue.h"

namespace ikattn::interpreter {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
const c10::Device kDevice(kType, 0);

// --- Memory

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, kDevice};
    const size_t whole = (bytes + kZone - 1) / kZone * kZone + 2 * kZone;
    const bool fits = held_ + bytes <= limit_;
    auto* zone = static_cast<unsigned char*>(fits ? std::aligned_alloc(kZone, whole) : nullptr);
    TORCH_CHECK_WITH(OutOfMemoryError, zone != nullptr, "interpreter: no memory for ", bytes,
                     " bytes");
    held_ += bytes;
    std::memset(zone, kUnwritten, whole);
    std::memcpy(zone, &bytes, sizeof(bytes));
    return {zone + kZone, zone, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  // Beside what is held; less than 0: any.
  static void limit(int64_t bytes) {
    limit_ = bytes < 0 ? kAny : held_ + static_cast<size_t>(bytes);
  }

 private:
  static constexpr size_t kAny = size_t{1} << 62;
  inline static std::atomic<size_t> held_ = 0, limit_ = kAny;  // bytes
  static constexpr size_t kZone = 256;  // bytes before and behind, the alignment of CUDA's memory
  static constexpr int kUnwritten = 0xff;

  static void release(void* pointer) {
    if (pointer == nullptr) return;
    const auto* zone = static_cast<const unsigned char*>(pointer);
    size_t bytes = 0;
    std::memcpy(&bytes, zone, sizeof(bytes));
    const auto is_unwritten = [](unsigned char byte) { return byte == kUnwritten; };
    const unsigned char* end = zone + kZone + bytes;
    if (!std::all_of(zone + sizeof(bytes), zone + kZone, is_unwritten) ||
        !std::all_of(end, end + kZone, is_unwritten)) {
      std::fprintf(stderr, "interpreter: a kernel wrote beside a tensor of %zu bytes\n", bytes);
      std::abort();
    }
    held_ -= bytes;
    std::free(pointer);
  }
};

DeviceMemory memory;

// --- What torch asks of a device: there is one, without streams

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// --- torch's operators

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys,
                                           c10::dtype_or_default(dtype));
}

// Returns the same elements as a tensor of the CPU, for as long as `tensor` lives.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  const at::Tensor there = at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                         tensor.strides(), tensor.options().device(at::kCPU));
  return tensor.is_neg() ? at::_neg_view(there) : there;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// A negated view is copied with its sign, or torch would copy it to resolve that.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", at::native::resize_);
}

TORCH_LIBRARY(ikattn_interpreter, m) {
  m.def("limit_memory(int bytes) -> ()", [](int64_t bytes) { DeviceMemory::limit(bytes); });
}

const bool registered = [] {
  static Hooks hooks;
  c10::register_privateuse1_backend("interpreter");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, &memory);
  const auto is_set = [](const char* name) {
    const char* variable = std::getenv(name);
    return variable != nullptr && std::string(variable) == "1";
  };
  set_warpgroups(is_set("IKATTN_INTERPRETER_HOPPER"));
  const char* count = std::getenv("IKATTN_INTERPRETER_MULTIPROCESSORS");
  set_multiprocessors(count == nullptr ? 1 : std::atoi(count));
  return true;
}();

}  // namespace
}  // namespace ikattn::interpreter
