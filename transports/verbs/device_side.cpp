#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/device_side.hpp>
#include <kvferry/transports/verbs/memlock.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {
namespace {

constexpr std::uint32_t small_receive_count = 1024;
constexpr std::uint32_t large_receive_count = 64;
constexpr std::uint32_t small_send_count = 1024;
constexpr std::uint32_t large_send_count = 32;
constexpr std::uint32_t large_bytes = max_message_bytes + head_bytes;
constexpr std::uint32_t most_entries = 1u << 16;
// Acknowledging events takes a lock; many at once take it once.
constexpr unsigned events_per_acknowledgement = 64;

Status failed(std::string_view what, const Device& device, int error) {
  return {Errc::resource_exhausted,
          fmt::format("verbs: {} on {}: {}", what, device.facts.name(), std::strerror(error))};
}

}  // namespace

// ---------------------------------------------------------------- BufferPool

Result<std::unique_ptr<BufferPool>> BufferPool::create(const Device& device, std::uint32_t count, std::uint32_t bytes) {
  std::unique_ptr<BufferPool> pool(new BufferPool(device.context->api(), count, bytes));
  const std::size_t size = std::size_t{count} * bytes;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return failed(fmt::format("{} bytes of buffers", size), device, errno);
  pool->memory_ = static_cast<std::byte*>(memory);
  // A child of fork() must not make the device write into a copy.
  ::madvise(memory, size, MADV_DONTFORK);
  pool->registered_ =
      device.context->api().reg_mr(device.context->domain(), pool->memory_, size, IBV_ACCESS_LOCAL_WRITE);
  if (pool->registered_ == nullptr) {
    const int error = errno;
    return {Errc::resource_exhausted, fmt::format("verbs: registering {} bytes of buffers with {}: {}{}", size,
                                                  device.facts.name(), std::strerror(error), memlock_hint(error))};
  }
  for (std::uint32_t i = count; i > 0; --i) pool->free_.push_back(i - 1);
  return pool;
}

BufferPool::~BufferPool() {
  if (registered_ != nullptr) api_.dereg_mr(registered_);
  if (memory_ != nullptr) ::munmap(memory_, std::size_t{count_} * bytes_);
}

std::uint32_t BufferPool::take() noexcept {
  const std::uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

ibv_sge BufferPool::piece(std::uint32_t buffer, std::uint32_t bytes) const noexcept {
  return {reinterpret_cast<std::uintptr_t>(data(buffer)), bytes, registered_->lkey};
}

// ---------------------------------------------------------------- ReceiveQueue

Result<std::unique_ptr<ReceiveQueue>> ReceiveQueue::create(const Device& device, std::uint32_t count,
                                                           std::uint32_t bytes, std::uint32_t tag) {
  Api& api = device.context->api();
  const auto most = static_cast<std::uint32_t>(device.context->limits().max_srq_wr);
  auto buffers = BufferPool::create(device, most > 0 ? std::min(count, most) : count, bytes);
  if (!buffers) return buffers.status();
  std::unique_ptr<ReceiveQueue> made(new ReceiveQueue(api, std::move(*buffers), tag));
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = made->buffers_->count();
  attributes.attr.max_sge = 1;
  made->queue_ = api.create_srq(device.context->domain(), &attributes);
  if (made->queue_ == nullptr)
    return failed(fmt::format("a shared receive queue of {} buffers", made->buffers_->count()), device, errno);
  for (std::uint32_t i = 0; i < made->buffers_->count(); ++i) made->post(made->buffers_->take());
  return made;
}

ReceiveQueue::~ReceiveQueue() {
  if (queue_ != nullptr) api_.destroy_srq(queue_);
}

void ReceiveQueue::post(std::uint32_t buffer) noexcept {
  ibv_sge piece = buffers_->piece(buffer, buffers_->bytes());
  ibv_recv_wr request{};
  request.wr_id = std::uint64_t{tag_} << 32 | buffer;
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  // The queue has a place for every buffer, so only a device that has failed refuses.
  api_.post_srq_recv(queue_, &request, &bad);
}

// ---------------------------------------------------------------- CompletionQueue

Result<std::unique_ptr<CompletionQueue>> CompletionQueue::create(const Device& device, std::uint32_t entries) {
  Api& api = device.context->api();
  const auto most = static_cast<std::uint32_t>(std::max(1, device.context->limits().max_cqe));
  std::unique_ptr<CompletionQueue> made(new CompletionQueue(api, std::min(entries, most)));
  made->events_ = api.create_comp_channel(device.context->get());
  if (made->events_ == nullptr) return failed("a completion channel", device, errno);
  const int flags = ::fcntl(made->events_->fd, F_GETFL);
  if (flags < 0 || ::fcntl(made->events_->fd, F_SETFL, flags | O_NONBLOCK) != 0) return failed("fcntl", device, errno);
  made->queue_ = api.create_cq(device.context->get(), static_cast<int>(made->entries_), made->events_);
  if (made->queue_ == nullptr)
    return failed(fmt::format("a completion queue of {} entries", made->entries_), device, errno);
  return made;
}

CompletionQueue::~CompletionQueue() {
  if (queue_ != nullptr) {
    if (unacknowledged_ > 0) api_.ack_cq_events(queue_, unacknowledged_);
    api_.destroy_cq(queue_);
  }
  if (events_ != nullptr) api_.destroy_comp_channel(events_);
}

bool CompletionQueue::reserve(std::uint32_t entries) noexcept {
  if (entries > entries_ - std::min(entries_, reserved_)) return false;
  reserved_ += entries;
  return true;
}

int CompletionQueue::poll(std::span<ibv_wc> completions) noexcept {
  return api_.poll_cq(queue_, static_cast<int>(completions.size()), completions.data());
}

void CompletionQueue::arm() noexcept {
  ibv_cq* queue = nullptr;
  while (api_.get_cq_event(events_, &queue) == 0) ++unacknowledged_;
  if (unacknowledged_ >= events_per_acknowledgement) {
    api_.ack_cq_events(queue_, unacknowledged_);
    unacknowledged_ = 0;
  }
  api_.req_notify_cq(queue_);
}

// ---------------------------------------------------------------- DeviceSide

Result<std::unique_ptr<DeviceSide>> DeviceSide::create(const Device& device, std::uint32_t index) {
  std::unique_ptr<DeviceSide> side(new DeviceSide(device, index));
  auto completions = CompletionQueue::create(device, most_entries);
  if (!completions) return completions.status();
  side->completions = std::move(*completions);
  auto small = ReceiveQueue::create(device, small_receive_count, small_bytes, small_receives_tag);
  if (!small) return small.status();
  side->small_receives = std::move(*small);
  auto large = ReceiveQueue::create(device, large_receive_count, large_bytes, large_receives_tag);
  if (!large) return large.status();
  side->large_receives = std::move(*large);
  // Each buffer that can arrive has its completion.
  side->completions->reserve(small_receive_count + large_receive_count);
  auto small_sends = BufferPool::create(device, small_send_count, small_bytes);
  if (!small_sends) return small_sends.status();
  side->small_sends = std::move(*small_sends);
  auto large_sends = BufferPool::create(device, large_send_count, large_bytes);
  if (!large_sends) return large_sends.status();
  side->large_sends = std::move(*large_sends);
  side->port_losses = device.context->port_losses(device.facts.port);
  return side;
}

void DeviceSide::give_back(const Posted& posted) noexcept {
  if (posted.small_buffer != Posted::no_buffer) small_sends->give_back(posted.small_buffer);
  if (posted.large_buffer != Posted::no_buffer) large_sends->give_back(posted.large_buffer);
}

}  // namespace kvferry::verbs
