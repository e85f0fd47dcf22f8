// What two ports tell each other in the private data of librdmacm's messages: as much as the exchange over
// the control connection (wire.hpp), in the few bytes that there are. Devices pad private data with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvferry/runtime/status.hpp>
#include <kvferry/transports/verbs/wire.hpp>

namespace kvferry::verbs {

/// Bytes that librdmacm leaves to its user (rdma_connect(3), rdma_accept(3), rdma_reject(3)).
inline constexpr std::size_t most_call_bytes = 56;
inline constexpr std::size_t most_reply_bytes = 196;
inline constexpr std::size_t most_refusal_bytes = 148;

/// Initiator → target, with each queue pair's request to connect.
struct CmCall {
  Token token{};
  std::uint64_t target_incarnation = 0;
  std::uint64_t channel = 0;     ///< as in ConnectRequest
  std::uint32_t mtu = 0;         ///< bytes
  std::uint32_t read_depth = 0;  ///< as in ConnectRequest
  std::uint32_t index = 0;       ///< of this queue pair; the last one is for messages
  std::uint32_t pairs = 0;       ///< of the channel
};

/// Target → initiator: what ConnectAnswer says, less what librdmacm says itself.
struct CmReply {
  std::uint32_t mtu = 0;
  std::uint32_t read_depth = 0;
  std::uint32_t notifications = 0;
  std::uint32_t messages = 0;
};

using PrivateData = std::vector<std::byte>;

PrivateData encode(const CmCall& call);
PrivateData encode(const CmReply& reply);
/// Target → initiator: why not. Texts that are too long are cut.
PrivateData encode_refusal(const Status& why);

/// Errors of all: malformed.
Result<CmCall> decode_call(std::span<const std::byte> data);
Result<CmReply> decode_reply(std::span<const std::byte> data);
/// The Status that was encoded.
Status decode_refusal(std::span<const std::byte> data);

}  // namespace kvferry::verbs
