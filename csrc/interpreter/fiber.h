// A function with a stack of its own, that can stop in the middle and be resumed.
#pragma once

#include <stddef.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace ikattn::interpreter {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Starts the fiber: entry(context) runs at the first resume(). Earlier frames are forgotten, not
  // unwound.
  void start(void (*entry)(void*), void* context);
  // Runs the fiber until it suspends itself or `entry` returns.
  void resume();
  // Suspends the fiber, which calls it itself.
  void suspend() { leave(false); }

 private:
  static void begin(Fiber* self);
  static void begin_current();
  void leave(bool forever);
  void switch_in();
  void switch_out();

  char* mapping_;  // an inaccessible page, then the stack
  char* stack_;
  void (*entry_)(void*) = nullptr;
  void* context_ = nullptr;
  bool running_ = false;  // true from start() until `entry` has returned
  // Numbers that AddressSanitizer keeps for a stack that is not running.
  void* fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_stack_bytes_ = 0;
#if defined(__x86_64__)
  void* own_stack_pointer_ = nullptr;
  void* resumer_stack_pointer_ = nullptr;
#else
  ucontext_t own_;
  ucontext_t resumer_;
#endif
};

}  // namespace ikattn::interpreter
