// Barriers as other parts of the machine use them.
#pragma once

#include "access.h"

namespace moksim {

// The mbarrier at a shared::cluster address; an error names the instruction if there is none.
Mbarrier& find_mbarrier(Warp& w, const Op& op, uint32_t shared_address, Cta** owner = nullptr);

// `count` arrivals that release `order` (nullptr: relaxed), and a change of the transaction count. Completes the phase
// when both are zero (PTX ISA 9.7.13.15.5).
void mbarrier_update(Machine& m, Cta& cta, Mbarrier& b, uint32_t count, int64_t tx_change, const Order* order,
                     uint32_t op);

}  // namespace moksim
