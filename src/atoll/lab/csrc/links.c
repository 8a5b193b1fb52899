#define _GNU_SOURCE
#include "links.h"

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGN = 16 };

static void *reserve(uint64_t bytes)
{
    void *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? 0 : memory;
}

bool link_open(struct link *l, uint32_t records, uint64_t bytes)
{
    for (l->room = 1; l->room < records; l->room *= 2)
        ;
    l->ring_size = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    l->queue = reserve(l->room * sizeof *l->queue);
    l->heap = reserve(l->room * sizeof *l->heap);
    l->ring = reserve(l->ring_size);
    return l->queue && l->heap && l->ring;
}

void link_close(struct link *l)
{
    if (l->queue)
        munmap(l->queue, l->room * sizeof *l->queue);
    if (l->heap)
        munmap(l->heap, l->room * sizeof *l->heap);
    if (l->ring)
        munmap(l->ring, l->ring_size);
    l->queue = l->heap = 0;
    l->ring = 0;
}

/* -- memory: blocks in a ring, freed in any order, taken back from the oldest on -- */

static struct block *block_at(struct link *l, uint64_t place)
{
    return (struct block *)(l->ring + place % l->ring_size);
}

static struct block *allocate(struct link *l, uint64_t bytes)
{
    uint64_t size = (offsetof(struct block, data) + bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (l->ring_head == l->ring_tail)
        l->ring_head = l->ring_tail = 0; /* an idle link stays in the same few pages */
    uint64_t place = l->ring_head % l->ring_size, rest = l->ring_size - place;
    uint64_t skip = rest < size ? rest : 0; /* a block does not wrap round the end */
    if (l->ring_head + skip + size - l->ring_tail > l->ring_size)
        return 0;
    if (skip) {
        struct block *filler = block_at(l, l->ring_head);
        filler->size = (uint32_t)skip;
        filler->left = 0;
        l->ring_head += skip;
    }
    struct block *block = block_at(l, l->ring_head);
    block->size = (uint32_t)size;
    l->ring_head += size;
    return block;
}

void link_release(struct link *l, struct block *block)
{
    if (--block->left)
        return;
    while (l->ring_tail != l->ring_head && !block_at(l, l->ring_tail)->left)
        l->ring_tail += block_at(l, l->ring_tail)->size;
}

/* -- the packets on their way -- */

static void heap_add(struct link *l, struct record record)
{
    uint32_t at = l->heap_count++;
    for (; at && l->heap[(at - 1) / 2].due > record.due; at = (at - 1) / 2)
        l->heap[at] = l->heap[(at - 1) / 2];
    l->heap[at] = record;
}

static struct record heap_take(struct link *l)
{
    struct record top = l->heap[0], last = l->heap[--l->heap_count];
    uint32_t at = 0, child;
    while ((child = 2 * at + 1) < l->heap_count) {
        if (child + 1 < l->heap_count && l->heap[child + 1].due < l->heap[child].due)
            child++;
        if (l->heap[child].due >= last.due)
            break;
        l->heap[at] = l->heap[child];
        at = child;
    }
    l->heap[at] = last;
    return top;
}

struct record link_take(struct link *l)
{
    if (link_next(l) == l->heap)
        return heap_take(l);
    return l->queue[l->queue_tail++ & (l->room - 1)];
}

static bool has_room(const struct link *l, uint32_t records)
{
    return l->queue_head - l->queue_tail + records <= l->room && l->heap_count + records <= l->room;
}

/* -- arrival -- */

static void count_fate(int64_t *c, int64_t now, int64_t bytes, const struct fate *fate)
{
    static const enum link_counter lost[] = {0, QUEUE_PACKETS, LOSS_PACKETS, OUTAGE_PACKETS};
    count(&c[OFFERED_PACKETS], 1);
    count(&c[OFFERED_BYTES], bytes);
    if (fate->verdict != DELIVERED) {
        count(&c[lost[fate->verdict]], 1);
        count(&c[lost[fate->verdict] + 1], bytes);
    }
    if (fate->verdict == LOST_QUEUE)
        return;
    int64_t waited = fate->left - now - fate->busy_ps / 1000;
    count(&c[BUSY_PS], fate->busy_ps);
    count(&c[QUEUE_DELAY], waited > 0 ? waited : 0);
    count_most(&c[QUEUE_DELAY_MOST], waited);
    if (fate->verdict == DELIVERED) {
        count(&c[DUPLICATED], fate->copies - 1);
        count(&c[CORRUPTED], fate->corrupted);
        count(&c[REORDERED], fate->overtook);
    }
}

/* Keep segments first to last, which all arrive. */
static void keep_run(struct link *l, const struct packet *p, const uint8_t *data, const struct fate *fates,
                     uint32_t first, uint32_t last)
{
    uint32_t run = last - first + 1;
    uint64_t start = (uint64_t)first * p->gso;
    uint64_t payload = (uint64_t)(run - 1) * p->gso + segment_payload(p, last);
    struct block *block = has_room(l, run) ? allocate(l, p->header + payload) : 0;
    if (!block) {
        count(&l->counters[OVERFLOWED], run);
        return;
    }
    block->left = run;
    block->first = first;
    block->packet = *p;
    memcpy(block->data, data, p->header);
    memcpy(block->data + p->header, data + p->header + start, payload);
    for (uint32_t i = first; i <= last; i++) {
        const struct fate *f = &fates[i];
        struct record record = {f->delivered, block, (uint16_t)i, (uint8_t)f->copies, f->corrupted,
                                (uint32_t)f->draw};
        if (f->overtook)
            heap_add(l, record);
        else
            l->queue[l->queue_head++ & (l->room - 1)] = record;
    }
}

void link_offer(struct link *l, int64_t now, const struct packet *p, const uint8_t *data)
{
    struct fate fates[MOST_SEGMENTS];
    for (uint32_t i = 0; i < p->segments; i++) {
        int64_t bytes = p->header + segment_payload(p, i);
        direction_decide(&l->direction, now, bytes, &fates[i]);
        count_fate(l->counters, now, bytes, &fates[i]);
    }
    for (uint32_t i = 0, first; i < p->segments; i++) {
        if (fates[i].verdict != DELIVERED)
            continue;
        for (first = i; i + 1 < p->segments && fates[i + 1].verdict == DELIVERED;)
            i++;
        keep_run(l, p, data, fates, first, i);
    }
}
