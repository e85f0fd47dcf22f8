// One posted item on its way through a channel.
#pragma once

#include <cstdint>

#include <kvferry/transports/transport.hpp>
#include <kvferry/transports/verbs/registration.hpp>

namespace kvferry::verbs {

class SendQueue;

struct Item {
  WorkItem work;  ///< `slices` is what is still to be posted
  Status result;  ///< the first error
  const RegionKeys* local = nullptr;
  const RegionKeys* remote = nullptr;
  SendQueue* queue = nullptr;
  std::uint64_t bytes = 0;        ///< of the whole item
  std::uint32_t outstanding = 0;  ///< requests in flight
  std::uint32_t number = 0;       ///< of its notification or message
  bool in_use = false;
  bool data_posted = false;
  bool announced = false;  ///< the notification or message is posted
  bool accepted = false;   ///< by the target's engine

  bool announces() const noexcept { return work.op == Op::write_imm || work.op == Op::send; }
};

}  // namespace kvferry::verbs
