// The target's side of one request, from its descriptors to its response.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

#include <kvferry/runtime/region.hpp>
#include <kvferry/runtime/status.hpp>

#include "stream.hpp"
#include "wire.hpp"

namespace kvferry::tcp {

struct Answer : Outgoing {
  std::vector<iovec> parts;  ///< [0] the response's header, then region memory
  std::array<std::byte, response_bytes> header;
  std::string text;
  RegionKey region;
  bool touches_region = false;  ///< parts point into `region`

  /// Makes it the response `status` to request `id`; with status ok, `payload_bytes` of parts [1, ...) follow.
  void respond(std::uint32_t id, const Status& status, std::uint64_t payload_bytes);
};

/// Answers used again, so that serving allocates nothing once warm.
class AnswerPool {
 public:
  Answer& take();
  void give(Answer& answer);
  std::size_t in_use() const noexcept { return in_use_; }

 private:
  std::vector<std::unique_ptr<Answer>> free_;
  std::size_t in_use_ = 0;
};

}  // namespace kvferry::tcp
