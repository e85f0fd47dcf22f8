// What a port keeps on one device: its completion queue, the buffers messages arrive in, and those they
// leave from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/device.hpp>

namespace kvferry::verbs {

/// Equal buffers in one registered stretch of memory, given out by number.
class BufferPool {
 public:
  static Result<std::unique_ptr<BufferPool>> create(const Device& device, std::uint32_t count, std::uint32_t bytes);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  bool empty() const noexcept { return free_.empty(); }
  std::uint32_t take() noexcept;
  void give_back(std::uint32_t buffer) noexcept { free_.push_back(buffer); }
  std::byte* data(std::uint32_t buffer) const noexcept { return memory_ + std::size_t{buffer} * bytes_; }
  ibv_sge piece(std::uint32_t buffer, std::uint32_t bytes) const noexcept;
  std::uint32_t count() const noexcept { return count_; }
  std::uint32_t bytes() const noexcept { return bytes_; }

 private:
  BufferPool(Api& api, std::uint32_t count, std::uint32_t bytes) : api_(api), count_(count), bytes_(bytes) {}

  Api& api_;
  const std::uint32_t count_;
  const std::uint32_t bytes_;
  std::byte* memory_ = nullptr;
  ibv_mr* registered_ = nullptr;
  std::vector<std::uint32_t> free_;
};

/// A shared receive queue whose every buffer is posted unless somebody is reading it.
class ReceiveQueue {
 public:
  /// `tag` comes back in the high half of each completion's wr_id, the buffer's number in the low one.
  static Result<std::unique_ptr<ReceiveQueue>> create(const Device& device, std::uint32_t count, std::uint32_t bytes,
                                                      std::uint32_t tag);
  ~ReceiveQueue();
  ReceiveQueue(const ReceiveQueue&) = delete;
  ReceiveQueue& operator=(const ReceiveQueue&) = delete;

  ibv_srq* get() const noexcept { return queue_; }
  const std::byte* data(std::uint32_t buffer) const noexcept { return buffers_->data(buffer); }
  std::uint32_t bytes() const noexcept { return buffers_->bytes(); }
  /// Lets the device fill the buffer again.
  void post(std::uint32_t buffer) noexcept;

 private:
  ReceiveQueue(Api& api, std::unique_ptr<BufferPool> buffers, std::uint32_t tag)
      : api_(api), buffers_(std::move(buffers)), tag_(tag) {}

  Api& api_;
  std::unique_ptr<BufferPool> buffers_;
  const std::uint32_t tag_;
  ibv_srq* queue_ = nullptr;
};

/// All completions of a port's queue pairs on one device.
class CompletionQueue {
 public:
  static Result<std::unique_ptr<CompletionQueue>> create(const Device& device, std::uint32_t entries);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  ibv_cq* get() const noexcept { return queue_; }
  int event_fd() const noexcept { return events_->fd; }
  /// Makes room for completions that may be outstanding at once; false when there is none.
  bool reserve(std::uint32_t entries) noexcept;
  void release(std::uint32_t entries) noexcept { reserved_ -= entries; }
  std::uint32_t entries() const noexcept { return entries_; }

  /// Negative when the device has failed.
  int poll(std::span<ibv_wc> completions) noexcept;
  /// The next completion makes event_fd() readable. Those that came before do not: poll once more.
  void arm() noexcept;

 private:
  CompletionQueue(Api& api, std::uint32_t entries) : api_(api), entries_(entries) {}

  Api& api_;
  const std::uint32_t entries_;
  std::uint32_t reserved_ = 0;
  ibv_comp_channel* events_ = nullptr;
  ibv_cq* queue_ = nullptr;
  unsigned unacknowledged_ = 0;
};

inline constexpr std::uint32_t small_bytes = 256;
inline constexpr std::uint32_t small_receives_tag = 0xfffffffe;
inline constexpr std::uint32_t large_receives_tag = 0xffffffff;

struct Item;

/// One request on its way, and whom its end concerns.
struct Posted {
  static constexpr std::uint32_t no_buffer = UINT32_MAX;

  Item* item = nullptr;  ///< none for what the port sends by itself
  std::uint32_t small_buffer = no_buffer;
  std::uint32_t large_buffer = no_buffer;
};

struct DeviceSide {
  static Result<std::unique_ptr<DeviceSide>> create(const Device& device, std::uint32_t index);

  /// Frees the buffers that a request which has ended was sent from.
  void give_back(const Posted& posted) noexcept;

  const Device& device;
  const std::uint32_t index;  ///< in the order of the devices
  std::unique_ptr<CompletionQueue> completions;
  std::unique_ptr<ReceiveQueue> small_receives;  ///< notifications and what is accepted
  std::unique_ptr<ReceiveQueue> large_receives;  ///< messages
  std::unique_ptr<BufferPool> small_sends;
  std::unique_ptr<BufferPool> large_sends;
  std::uint32_t port_losses = 0;  ///< as last seen
  bool lost = false;

 private:
  DeviceSide(const Device& of, std::uint32_t at) : device(of), index(at) {}
};

}  // namespace kvferry::verbs
