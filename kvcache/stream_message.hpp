// What the two ends of a layer stream say to each other: the ticket that one side hands out, and the messages
// that follow. MessagePack maps; anything malformed is refused. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/plan.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

inline constexpr std::uint32_t stream_schema_version = 1;
inline constexpr std::size_t max_ticket_bytes = 1 << 20;
inline constexpr std::uint32_t max_ticket_blocks = 65536;
inline constexpr std::size_t max_stream_text = 1024;
/// Checksums of one layer, so that they fit into one message of an engine.
inline constexpr std::uint32_t max_layer_checksums = 8000;

/// Which way the bytes of a stream go.
enum class StreamForm : std::uint8_t {
  pull = 0,  ///< the producer offers, the consumer reads
  push = 1,  ///< the consumer offers, the producer writes
};

/// What whoever takes part has to know of the side that offers.
struct StreamTicket {
  StreamForm form = StreamForm::push;
  std::uint64_t stream = 0;
  std::uint64_t incarnation = 0;  ///< of the offering engine
  std::string lease;              ///< name of the lease on its blocks
  std::string layout;             ///< encode_layout
  std::uint32_t rank = 0;
  std::vector<BlockId> blocks;
  IndexRange tokens;
  Payload payload = Payload::values;
  bool checksums = false;
};

std::string encode(const StreamTicket& ticket);
/// Errors: malformed, version_mismatch.
Result<StreamTicket> decode_ticket(std::span<const std::byte> bytes);

/// From the side that takes part: it is there. The heads that the two ranks exchange, and the consumer's block size.
struct OpenStream {
  HeadRange heads;
  std::uint32_t unit_tokens = 1;
};
/// From the producer: the layer was written (push), or can be read (pull).
struct LayerReady {
  std::uint32_t layer = 0;
  std::vector<std::uint64_t> checksums;  ///< none unless asked for
};
/// From the consumer of a push: the layer's checksums do not fit, write it again.
struct LayerAgain {
  std::uint32_t layer = 0;
};
/// From the consumer: everything has arrived.
struct StreamDone {};
/// From either: the stream has failed.
struct StreamFailed {
  std::uint32_t code = 0;  ///< Errc
  std::string text;
};

using StreamBody = std::variant<OpenStream, LayerReady, LayerAgain, StreamDone, StreamFailed>;

struct StreamMessage {
  std::uint64_t stream = 0;
  StreamBody body;
};

/// At most the largest message of an engine.
std::string encode(const StreamMessage& message);
/// Errors: malformed, version_mismatch.
Result<StreamMessage> decode_stream_message(std::span<const std::byte> bytes);

}  // namespace kvferry
