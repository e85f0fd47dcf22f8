// A queue pair and its way to ready-to-send.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <kvferry/runtime/config.hpp>
#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/device.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {

/// What a queue pair is created with.
struct PairSpec {
  ibv_cq* queue = nullptr;  ///< all its completions
  ibv_srq* receives = nullptr;
  std::uint32_t depth = 0;  ///< requests in flight
};

/// The way that librdmacm has found.
struct ResolvedWay {
  ibv_ah_attr way{};
  std::uint32_t psn = 0;  ///< first of our own packets, as it told the peer
};

/// Where a queue pair is to lead.
struct PairRoute {
  PairAddress peer;
  std::uint16_t lid = 0;        ///< InfiniBand: of the peer
  RawGid gid{};                 ///< of the peer
  std::uint32_t gid_index = 0;  ///< of our own port
  bool global = false;
  std::uint32_t mtu = 0;                     ///< bytes
  std::uint32_t reads_out = 0;               ///< reads of ours in flight
  std::uint32_t reads_served = 0;            ///< reads of the peer's in flight
  std::optional<ResolvedWay> resolved = {};  ///< stands for lid, gid and global
};

/// One reliable connection. Destroying it ends it for the device too: nothing moves afterwards.
class QueuePair {
 public:
  static Result<std::unique_ptr<QueuePair>> create(const Device& device, const PairSpec& spec);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  Status connect(const PairRoute& route, const VerbsConfig& config);
  /// Ends everything in flight: completions with a flush error follow.
  void fail() noexcept;

  ibv_qp* get() const noexcept { return pair_; }
  PairAddress address() const noexcept { return {pair_->qp_num, psn_}; }
  std::uint32_t depth() const noexcept { return depth_; }
  std::uint32_t max_inline() const noexcept { return max_inline_; }
  std::uint32_t max_pieces() const noexcept { return max_pieces_; }

 private:
  explicit QueuePair(const Device& device) : device_(device) {}
  Status to_init();
  Status to_receive(const PairRoute& route, const VerbsConfig& config);
  Status to_send(const PairRoute& route, const VerbsConfig& config);
  Status modify(ibv_qp_attr& attributes, int mask, std::string_view to);

  const Device& device_;
  ibv_qp* pair_ = nullptr;
  std::uint32_t psn_ = 0;
  std::uint32_t depth_ = 0;
  std::uint32_t max_inline_ = 0;
  std::uint32_t max_pieces_ = 1;
};

/// The verbs code of an MTU in bytes, rounded down to one that exists.
ibv_mtu mtu_code(std::uint32_t bytes) noexcept;

}  // namespace kvferry::verbs
