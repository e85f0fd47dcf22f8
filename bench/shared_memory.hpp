// Memory that two processes of one host see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvferry/runtime/status.hpp>

#include "bench/file_descriptor.hpp"

namespace kvferry::bench {

class SharedMemory {
 public:
  SharedMemory() = default;
  /// Zeroed memory in a new memfd.
  static Result<SharedMemory> create(const char* name, std::uint64_t bytes);
  /// The memory behind descriptor `memfd` of process `pid`.
  static Result<SharedMemory> open(int pid, int memfd, std::uint64_t bytes);

  SharedMemory(SharedMemory&& other) noexcept
      : file_(std::move(other.file_)), bytes_(std::exchange(other.bytes_, {})) {}
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~SharedMemory();

  int memfd() const noexcept { return file_.get(); }
  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  Status map(std::uint64_t bytes);

  FileDescriptor file_;
  std::span<std::byte> bytes_;
};

}  // namespace kvferry::bench
