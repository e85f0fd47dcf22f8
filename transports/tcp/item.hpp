// The initiator's side of one request: a WorkItem that was taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <sys/uio.h>

#include <kvferry/transports/transport.hpp>

#include "stream.hpp"
#include "wire.hpp"

namespace kvferry::tcp {

class ChannelSocket;

struct Item : Outgoing {
  std::uint64_t cookie = 0;
  Op op = Op::read;
  std::uint32_t id = 0;
  std::uint64_t bytes = 0;          ///< payload, in whichever direction
  std::vector<iovec> parts;         ///< [0] request and descriptors, then local memory
  std::vector<std::byte> wire;      ///< request and descriptors; only its first parts[0].iov_len bytes are used
  ChannelSocket* socket = nullptr;  ///< that carries it
  std::size_t index = 0;            ///< where its channel keeps it
  bool sent = false;                ///< all of it is with the kernel
  bool abandoned = false;           ///< completed already; the response is thrown away

  /// Encodes `work`, joining neighbours that touch: remote ones in the descriptors, local ones in parts.
  void prepare(const WorkItem& work);
  std::span<iovec> local_parts() noexcept { return std::span(parts).subspan(1); }

 private:
  std::uint32_t add_slices(const WorkItem& work);
};

/// Items by id; used again, so that posting allocates nothing once warm.
class ItemPool {
 public:
  /// nullptr when all ids are in use.
  Item* take();
  void give(Item& item);
  /// The item in flight with that id, or nullptr.
  Item* find(std::uint32_t id) const noexcept;
  std::size_t in_use() const noexcept { return items_.size() - free_.size(); }

 private:
  std::vector<std::unique_ptr<Item>> items_;
  std::vector<std::uint16_t> free_;
};

}  // namespace kvferry::tcp
