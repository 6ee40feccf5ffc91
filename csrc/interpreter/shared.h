// Shared<T>: what is T* under nvcc, as a class that shows each access to the interpreter. The rules
// for its use stand in support/cuda/launch.h.
#pragma once

#include <string.h>

#include <concepts>
#include <type_traits>

#include "interpreter/interpreter.h"

namespace ikattn {

template <typename T>
class Shared;

namespace interpreter {

// An index that remembers where in the source it was written.
struct PlacedIndex {
  template <std::integral Integer>
  PlacedIndex(Integer value, Place place = Place::current())
      : value(static_cast<int64_t>(value)), place(place) {}
  int64_t value;
  Place place;
};

template <typename T>
T read_shared(uint32_t address, Place place) {
  std::remove_const_t<T> value;
  memcpy(&value, access_shared(Access::kRead, address, sizeof(T), alignof(T), place), sizeof(T));
  return value;
}

template <typename T>
void write_shared(uint32_t address, const T& value, Place place) {
  memcpy(access_shared(Access::kWrite, address, sizeof(T), alignof(T), place), &value, sizeof(T));
}

// Reference to keys[i]: reads when it turns into a T, which a named one (`auto x = keys[i]`)
// cannot.
template <typename T>
class SharedReference {
 public:
  using Value = std::remove_const_t<T>;

  SharedReference(uint32_t address, Place place) : address_(address), place_(place) {}
  SharedReference(const SharedReference&) = delete;

  operator Value() && { return get(); }
  void operator=(const Value& value) && { write_shared<Value>(address_, value, place_); }
  void operator=(SharedReference&& other) && { write_shared<Value>(address_, other.get(), place_); }
  void operator+=(const Value& value) && { write_shared<Value>(address_, get() + value, place_); }
  void operator-=(const Value& value) && { write_shared<Value>(address_, get() - value, place_); }
  void operator*=(const Value& value) && { write_shared<Value>(address_, get() * value, place_); }
  Shared<T> operator&() && { return Shared<T>::at(address_); }

 private:
  Value get() const { return read_shared<Value>(address_, place_); }

  uint32_t address_;
  Place place_;
};

}  // namespace interpreter

template <typename T>
class Shared {
 public:
  Shared() = default;
  static Shared at(uint32_t address) {
    Shared shared;
    shared.address_ = address;
    return shared;
  }

  operator Shared<const T>() const
    requires(!std::is_const_v<T>)
  {
    return Shared<const T>::at(address_);
  }

  interpreter::SharedReference<T> operator[](interpreter::PlacedIndex index) const {
    return {(*this + index.value).address_, index.place};
  }
  interpreter::SharedReference<T> operator*() const { return {address_, {}}; }

  Shared operator+(int64_t count) const {
    return at(address_ + static_cast<uint32_t>(count * static_cast<int64_t>(sizeof(T))));
  }
  Shared operator-(int64_t count) const { return *this + -count; }
  Shared& operator+=(int64_t count) { return *this = *this + count; }
  Shared& operator-=(int64_t count) { return *this = *this - count; }
  int64_t operator-(Shared other) const {
    return static_cast<int32_t>(address_ - other.address_) / static_cast<int64_t>(sizeof(T));
  }
  auto operator<=>(const Shared&) const = default;

  uint32_t address() const { return address_; }

 private:
  uint32_t address_ = 0;
};

// A static array is known by a variable of its own: one for each declaration and each
// instantiation of the template around it.
#define IKATTN_SHARED(T, name, count)                                                            \
  static const char name##_declaration = 0;                                                      \
  const ::ikattn::Shared<T> name = ::ikattn::Shared<T>::at(::ikattn::interpreter::static_shared( \
      &name##_declaration, sizeof(T) * (count), ::ikattn::interpreter::Place::current()))

template <typename T>
Shared<T> dynamic_shared(uint32_t offset_bytes = 0) {
  return Shared<T>::at(offset_bytes);
}

template <typename To, typename From>
Shared<To> shared_cast(Shared<From> from) {
  return Shared<To>::at(from.address());
}

template <typename T>
uint32_t shared_address(Shared<T> shared) {
  return shared.address();
}

template <typename Vector, typename T>
Vector load_vector(Shared<T> from, interpreter::Place place = interpreter::Place::current()) {
  return interpreter::read_shared<Vector>(from.address(), place);
}

template <typename Vector, typename T>
void store_vector(Shared<T> to, const Vector& value,
                  interpreter::Place place = interpreter::Place::current()) {
  interpreter::write_shared<Vector>(to.address(), value, place);
}

template <typename Vector, typename T>
Vector load_vector(const T* from, interpreter::Place place = interpreter::Place::current()) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(Vector) != 0) {
    interpreter::fail("a vector load from global memory is not aligned", place);
  }
  Vector value;
  memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Vector, typename T>
void store_vector(T* to, const Vector& value,
                  interpreter::Place place = interpreter::Place::current()) {
  if (reinterpret_cast<uintptr_t>(to) % alignof(Vector) != 0) {
    interpreter::fail("a vector store to global memory is not aligned", place);
  }
  memcpy(to, &value, sizeof(value));
}

}  // namespace ikattn
