#include "initiator.hpp"

#include <algorithm>

#include <fmt/format.h>

#include <kvferry/runtime/log.hpp>

namespace kvferry::tcp {

Initiator::~Initiator() {
  for (auto& [id, channel] : channels_) channel->end({});
}

Channel* Initiator::find(ChannelId channel) const {
  const auto found = channels_.find(channel);
  return found == channels_.end() ? nullptr : found->second.get();
}

Result<ChannelId> Initiator::open(const ChannelSpec& spec) {
  const Result<Endpoint> endpoint = resolve(spec.address, spec.host);
  if (!endpoint) return endpoint.status();
  auto channel = std::make_unique<Channel>(*this, loop_, config_, next_channel_, spec, *endpoint);
  if (Status status = channel->connect(); !status) {
    channel->end(status);
    return status;
  }
  channels_.emplace(next_channel_, std::move(channel));
  ++connecting_;
  return next_channel_++;
}

std::size_t Initiator::post(ChannelId channel, std::span<const WorkItem> works) {
  Channel* found = find(channel);
  return found == nullptr ? 0 : found->post(works);
}

void Initiator::cancel(ChannelId channel, std::uint64_t cookie) {
  if (Channel* found = find(channel)) found->cancel(cookie);
}

void Initiator::fence(ChannelId channel, const Status& why) {
  Channel* found = find(channel);
  if (found == nullptr) return;
  on_lost(*found, {Errc::channel_error, fmt::format("tcp channel to {} fenced: {}", found->peer(), why.to_string())});
}

void Initiator::on_up(Channel& channel) {
  --connecting_;
  events_.push_back({channel.id(), std::nullopt});
}

void Initiator::on_lost(Channel& channel, const Status& why) {
  const bool was_up = channel.up();
  if (!was_up) --connecting_;
  auto node = channels_.extract(channel.id());
  ended_.push_back(std::move(node.mapped()));
  const Status down =
      was_up && !(why == Errc::channel_error) ? Status(Errc::channel_error, std::string(why.text())) : why;
  auto unsettled = channel.end(down);
  events_.push_back({channel.id(), down});
  if (unsettled.empty()) return;
  const ChannelSpec& spec = channel.spec();
  const Hello hello{Purpose::fence, 0, spec.token, spec.target_incarnation, channel.nonce()};
  fences_.push_back(std::make_unique<Fence>(loop_, config_, channel.endpoint(), hello, down, std::move(unsettled),
                                            Clock::now() + fence_limit_));
}

void Initiator::run_timers(TimePoint now) {
  if (connecting_ > 0) give_up_late_connects(now);
  for (auto& fence : fences_) fence->run_timers(now);
}

void Initiator::give_up_late_connects(TimePoint now) {
  std::vector<Channel*> late;
  for (const auto& [id, channel] : channels_) {
    if (!channel->up() && channel->spec().give_up <= now) late.push_back(channel.get());
  }
  for (Channel* channel : late) {
    on_lost(*channel,
            {Errc::unreachable, fmt::format("tcp: {} did not answer in the time given to connect", channel->peer())});
  }
}

TimePoint Initiator::next_wakeup() const noexcept {
  TimePoint next = TimePoint::max();
  if (connecting_ > 0) {
    for (const auto& [id, channel] : channels_) {
      if (!channel->up()) next = std::min(next, channel->spec().give_up);
    }
  }
  for (const auto& fence : fences_) next = std::min(next, fence->next_wakeup());
  return next;
}

void Initiator::settle_fences() {
  std::erase_if(fences_, [this](const std::unique_ptr<Fence>& fence) {
    if (!fence->settled()) return false;
    const Status outcome = fence->outcome();
    for (const std::uint64_t cookie : fence->cookies()) on_completion(cookie, outcome);
    return true;
  });
}

void Initiator::deliver_events(PortEvents& events) {
  settle_fences();
  ended_.clear();
  delivering_.swap(events_);
  for (const Event& event : delivering_) {
    if (event.down) {
      events.on_channel_down(event.channel, *event.down);
    } else {
      events.on_channel_up(event.channel);
    }
  }
  delivering_.clear();
}

std::size_t Initiator::take_completions(std::span<Completion> completions) {
  const std::size_t count = std::min(completions.size(), completions_.size() - next_completion_);
  for (std::size_t i = 0; i < count; ++i) completions[i] = std::move(completions_[next_completion_ + i]);
  next_completion_ += count;
  if (next_completion_ == completions_.size()) {
    completions_.clear();
    next_completion_ = 0;
  }
  return count;
}

}  // namespace kvferry::tcp
