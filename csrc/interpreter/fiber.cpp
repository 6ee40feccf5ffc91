#include "interpreter/fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// AddressSanitizer must hear of every change of stack. Weak, so that the file serves programs
// without it.
extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** save, const void* bottom,
                                                          size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* restore, const void** old_bottom,
                                                           size_t* old_size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* begin, size_t size);
}

namespace ikattn::interpreter {
namespace {

// Room for a kernel's "registers" without optimisation, between the sanitizer's redzones.
constexpr size_t kStackBytes = 256 * 1024;

}  // namespace

#if defined(__x86_64__)

// swapcontext() asks the kernel for the signal mask, 40 times the cost of the switch itself.
// switch_stacks(&saved, next): the callee-saved registers go to the old stack and come from the
// new.
extern "C" void ikattn_switch_stacks(void** saved_stack_pointer, void* next_stack_pointer);
asm(R"(
.text
.hidden ikattn_switch_stacks
.globl ikattn_switch_stacks
.type ikattn_switch_stacks, @function
ikattn_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ikattn_switch_stacks, .-ikattn_switch_stacks
)");

void Fiber::switch_in() { ikattn_switch_stacks(&resumer_stack_pointer_, own_stack_pointer_); }
void Fiber::switch_out() { ikattn_switch_stacks(&own_stack_pointer_, resumer_stack_pointer_); }

#else

void Fiber::switch_in() { swapcontext(&resumer_, &own_); }
void Fiber::switch_out() { swapcontext(&own_, &resumer_); }

#endif

namespace {
Fiber* starting = nullptr;  // begin() takes no argument
}

Fiber::Fiber() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) abort();
  mapping_ = static_cast<char*>(memory);
  stack_ = mapping_ + page;
}

Fiber::~Fiber() { munmap(mapping_, static_cast<size_t>(stack_ - mapping_) + kStackBytes); }

void Fiber::start(void (*entry)(void*), void* context) {
  entry_ = entry;
  context_ = context;
  fake_stack_ = nullptr;
  // Frames that were abandoned left their redzones behind.
  if (running_ && __asan_unpoison_memory_region) {
    __asan_unpoison_memory_region(stack_, kStackBytes);
  }
  running_ = true;
#if defined(__x86_64__)
  // The frame is that of a begin_current() which was called with a return address of zero, where
  // stack traces end, and stopped before its first instruction: six registers, then the address
  // that `ret` takes.
  void** top = reinterpret_cast<void**>(stack_ + kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::begin_current);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  own_stack_pointer_ = top;
#else
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack_;
  own_.uc_stack.ss_size = kStackBytes;
  own_.uc_link = nullptr;
  makecontext(&own_, &Fiber::begin_current, 0);
#endif
}

void Fiber::begin_current() { begin(starting); }

void Fiber::begin(Fiber* self) {
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &self->resumer_stack_, &self->resumer_stack_bytes_);
  }
  self->entry_(self->context_);
  self->running_ = false;
  self->leave(true);
}

void Fiber::resume() {
  starting = this;
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&fake_stack, stack_, kStackBytes);
  }
  switch_in();
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }
}

void Fiber::leave(bool forever) {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(forever ? nullptr : &fake_stack_, resumer_stack_,
                                   resumer_stack_bytes_);
  }
  switch_out();
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack_, &resumer_stack_, &resumer_stack_bytes_);
  }
}

}  // namespace ikattn::interpreter
