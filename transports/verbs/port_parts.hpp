// What the parts of one verbs port share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <kvferry/runtime/config.hpp>
#include <kvferry/transports/completion_list.hpp>
#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/cm.hpp>
#include <kvferry/transports/verbs/device_side.hpp>
#include <kvferry/transports/verbs/registration.hpp>
#include <kvferry/transports/verbs/send_queue.hpp>

namespace kvferry::verbs {

/// Whoever has queue pairs on the port.
class PairOwner {
 public:
  virtual ~PairOwner() = default;
  virtual void on_sent(SendQueue& queue, const ibv_wc& completion) = 0;
};

struct PortParts {
  PortParts(const VerbsConfig& with, const std::vector<Device>& on, const Registrations& known,
            const PortContext& within, PortEvents& to)
      : config(with), devices(on), registrations(known), context(within), events(to) {}

  /// Makes completions of the queue reach the owner.
  void watch(SendQueue& queue, PairOwner& owner) { owners.emplace(queue.slot(), std::pair(&queue, &owner)); }
  void forget(const SendQueue& queue) { owners.erase(queue.slot()); }
  /// Numbers are not used again: a completion of a queue pair that is gone must meet nobody.
  std::uint32_t new_slot() noexcept { return next_slot++; }
  TimePoint now() const { return devices.front().context->api().now(); }

  const VerbsConfig& config;
  const std::vector<Device>& devices;
  const Registrations& registrations;
  const PortContext context;
  PortEvents& events;
  std::vector<std::unique_ptr<DeviceSide>> sides;
  std::unique_ptr<CmEvents> cm;  ///< where VerbsConfig::connect is rdmacm
  std::unordered_map<std::uint32_t, std::pair<SendQueue*, PairOwner*>> owners;
  CompletionList finished;
  std::vector<std::pair<ChannelId, std::string>> exchanges;  ///< to be handed to events
  std::uint32_t next_slot = 1;
};

}  // namespace kvferry::verbs
