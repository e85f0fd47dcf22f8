// Intrusive reference counting: one word inside the object, no control block.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace kvferry {

/// Points to an object that has ref() and unref(); unref() frees it at zero.
template <class T>
class RefPtr {
 public:
  RefPtr() noexcept = default;
  /// Takes over one reference that the caller holds (adopt) or adds one.
  explicit RefPtr(T* object, bool adopt = false) noexcept : object_(object) {
    if (object_ && !adopt) object_->ref();
  }
  RefPtr(const RefPtr& other) noexcept : RefPtr(other.object_) {}
  RefPtr(RefPtr&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  RefPtr& operator=(RefPtr other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~RefPtr() {
    if (object_) object_->unref();
  }

  T* get() const noexcept { return object_; }
  T* operator->() const noexcept { return object_; }
  T& operator*() const noexcept { return *object_; }
  explicit operator bool() const noexcept { return object_ != nullptr; }
  /// Gives the reference to the caller.
  T* release() noexcept { return std::exchange(object_, nullptr); }
  friend bool operator==(const RefPtr&, const RefPtr&) = default;

 private:
  T* object_ = nullptr;
};

}  // namespace kvferry
