#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include <kvferry/transports/shm/port.hpp>

namespace kvferry::shm {
namespace {

// A look at the sockets is a system call, more than a small copy costs. So there is one for every so
// many polls or copied bytes: often while the sockets are in use or an answer is awaited, seldom while
// there is only copying to do. Either way the peer's death is seen within about a millisecond.
constexpr std::int64_t least_polls_per_look = 16;
constexpr std::int64_t most_polls_per_look = 256;
constexpr std::uint64_t bytes_per_poll_count = 32 << 10;
constexpr int items_per_poll = 64;
constexpr std::size_t completions_reserved = 4096;

}  // namespace

Result<std::unique_ptr<Port>> ShmPort::open(const ShmConfig& config, const Options& options, const PortContext& context,
                                            PortEvents& events) {
  std::unique_ptr<ShmPort> port(new ShmPort(config, options, context, events));
  if (Status status = port->start(); !status) return status;
  return std::unique_ptr<Port>(std::move(port));
}

Status ShmPort::start() {
  if (parts_.epoll.fd() < 0)
    return {Errc::resource_exhausted, fmt::format("shm: epoll_create1: {}", std::strerror(errno))};
  parts_.finished.reserve(completions_reserved);
  if (parts_.config.copy_threads > 0) {
    Result<std::unique_ptr<CopyPool>> pool = CopyPool::start(parts_.config.copy_threads);
    if (!pool) return pool.status();
    parts_.pool = std::move(*pool);
    parts_.epoll.add(parts_.pool->done_fd(), Watched::helpers, 0, EPOLLIN);
  }
  Result<std::unique_ptr<Server>> server = Server::start(parts_);
  if (!server) return server.status();
  server_ = std::move(*server);
  return {};
}

ShmPort::~ShmPort() {
  for (const auto& [id, channel] : channels_) channel->stop_helpers();
  parts_.pool.reset();
  channels_.clear();
}

PortLimits ShmPort::limits() const {
  PortLimits limits;
  limits.item_bytes = parts_.config.chunk_bytes;
  limits.item_slices = max_call_pieces;
  limits.whole_bytes = std::min(limits.whole_bytes, limits.item_bytes);
  limits.channel_items = max_unacknowledged;
  return limits;
}

Channel* ShmPort::find(ChannelId id) {
  const auto found = channels_.find(id);
  return found != channels_.end() ? found->second.get() : nullptr;
}

Result<ChannelId> ShmPort::open(const ChannelSpec& spec) {
  auto channel = std::make_unique<Channel>(next_channel_, spec, parts_);
  if (Status status = channel->connect(); !status) return status;
  ++connecting_;
  channels_.emplace(next_channel_, std::move(channel));
  return next_channel_++;
}

std::size_t ShmPort::post(ChannelId channel, std::span<const WorkItem> items) {
  Channel* found = find(channel);
  return found != nullptr ? found->post(items) : 0;
}

void ShmPort::cancel(ChannelId channel, std::uint64_t cookie) {
  if (Channel* found = find(channel)) found->cancel(cookie);
}

void ShmPort::fence(ChannelId channel, const Status& why) {
  if (Channel* found = find(channel)) found->fail(why);
}

std::size_t ShmPort::poll(std::span<Completion> completions) {
  if (parts_.pool != nullptr) collect_from_helpers();
  const std::uint64_t copied = run_channels();
  if (!parts_.shared.empty()) collect_from_waiters();
  until_look_ -= 1 + static_cast<std::int64_t>(copied / bytes_per_poll_count);
  if (until_look_ <= 0 || about_to_sleep_) look_at_sockets();
  if (parts_.channel_ended) report_ended_channels();
  return parts_.finished.hand_over(completions);
}

/// One portion of each channel in turn, until the poll's share of bytes or items is used up.
std::uint64_t ShmPort::run_channels() {
  const std::uint64_t share = parts_.config.chunk_bytes;
  std::uint64_t copied = 0;
  for (int items = 0; items < items_per_poll && copied < share && !parts_.active.empty(); ++items) {
    if (turn_ >= parts_.active.size()) turn_ = 0;
    Channel& channel = *parts_.active[turn_];
    if (channel.has_work()) copied += channel.run(share - copied);
    if (channel.has_work()) {
      ++turn_;
      continue;
    }
    channel.active = false;
    parts_.active[turn_] = parts_.active.back();
    parts_.active.pop_back();
  }
  return copied;
}

void ShmPort::collect_from_helpers() {
  for (ItemQueue done = parts_.pool->collect(); Item* item = done.pop();) item->channel->on_helper_done(item);
}

void ShmPort::collect_from_waiters() {
  for (ItemQueue ended = std::exchange(parts_.shared, ItemQueue()); Item* item = ended.pop();) {
    if (Channel::end_sharing(*item))
      item->channel->on_helper_done(item);
    else
      parts_.shared.push(item);
  }
}

void ShmPort::look_at_sockets() {
  about_to_sleep_ = false;
  bool in_use = (parts_.active.empty() && parts_.outstanding > 0) || connecting_ > 0 || server_->stalled();
  const TimePoint now = Clock::now();
  // First, so that what arrives now and is not accepted is offered again from a later poll only.
  server_->tick(now);
  parts_.epoll.look([this, &in_use](Watched what, std::uint32_t id, std::uint32_t events) {
    in_use = true;
    switch (what) {
      case Watched::listener:
        server_->on_listener();
        break;
      case Watched::connection:
        server_->on_connection(id, events);
        break;
      case Watched::channel:
        if (Channel* channel = find(id)) channel->on_socket(events);
        break;
      case Watched::process:
        if (Channel* channel = find(id)) channel->on_process_end();
        break;
      case Watched::helpers:
        parts_.pool->quiet_bell();
        break;
    }
  });
  polls_per_look_ = in_use ? least_polls_per_look : std::min(polls_per_look_ * 2, most_polls_per_look);
  until_look_ = polls_per_look_;
  if (connecting_ == 0) return;
  connecting_ = 0;
  for (const auto& [id, channel] : channels_) {
    channel->tick(now);
    if (channel->connecting()) ++connecting_;
  }
}

void ShmPort::report_ended_channels() {
  parts_.channel_ended = false;
  for (auto at = channels_.begin(); at != channels_.end();) {
    if (!at->second->ended()) {
      ++at;
      continue;
    }
    const std::unique_ptr<Channel> gone = std::move(at->second);
    at = channels_.erase(at);
    std::erase(parts_.active, gone.get());
    parts_.events.on_channel_down(gone->id(), gone->why());
  }
}

Progress ShmPort::progress() const {
  if (!parts_.active.empty() || !parts_.shared.empty() || !parts_.finished.empty() || parts_.channel_ended)
    return Progress::runnable;
  return parts_.outstanding > 0 || connecting_ > 0 || server_->stalled() ? Progress::waiting : Progress::idle;
}

TimePoint ShmPort::next_wakeup() const {
  // Whoever asks is about to sleep until wait_fd() is readable; what woke it is looked at without delay.
  about_to_sleep_ = true;
  if (parts_.pool != nullptr) parts_.pool->arm();
  const TimePoint now = Clock::now();
  TimePoint next = server_->next_wakeup(now);
  if (connecting_ > 0)
    for (const auto& [id, channel] : channels_) next = std::min(next, channel->next_wakeup(now));
  return next;
}

}  // namespace kvferry::shm
