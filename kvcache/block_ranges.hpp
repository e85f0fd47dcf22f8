// Which bytes of a region some blocks are: what a lease of blocks is made of.
#pragma once

#include <span>
#include <vector>

#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/plan.hpp>
#include <kvferry/runtime/range_set.hpp>
#include <kvferry/runtime/status.hpp>

namespace kvferry {

/// The bytes of these blocks in these layers, in the region of values or of scales of one rank: every part, token
/// and head. Runs as long as the layout allows, in no particular order; give them to Engine::lease. Pure, any
/// thread. Errors: out_of_bounds (a block or layer that the layout does not have), invalid_argument (a range that
/// ends before it begins, scales of a layout without).
Result<std::vector<ByteRange>> block_ranges(const Layout& layout, std::span<const BlockId> blocks, IndexRange layers,
                                            Payload payload = Payload::values);

}  // namespace kvferry
