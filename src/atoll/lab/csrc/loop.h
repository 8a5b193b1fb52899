/* The emulator's one thread: reads what the sites send, and writes it where and when it arrives. */
#ifndef ATOLL_LOOP_H
#define ATOLL_LOOP_H

#include <poll.h>

#include "links.h"

/* In emulator.py's order; behind them the lateness histogram, then each link's counters. */
enum counter {
    STARTED, NOW, CPU, WRITTEN, LATENESS, LATENESS_MOST, LATE, BEHIND, MALFORMED, UNROUTED, WRITES, READS,
    REALTIME, LOCKED, COUNTERS
};
/* Lateness in ns: 8 buckets for each power of two. */
enum { HISTOGRAM = 8 * 40 };

struct site {
    int tun;
    bool open;                    /* reads still succeed */
    uint8_t address[16];
    uint8_t last_address[16];     /* the destination before, and where it lies: most come in runs */
    int last_target;
};

struct emulator {
    int site_count, link_count;
    struct site *sites;
    struct link *links;
    int *link_of;                 /* link_of[source * site_count + target], or -1 */
    struct tables tables;
    struct phase *phases;
    int64_t *counters;
    struct pollfd *polled;        /* each site's TUN, then the stop */
    int64_t origin;               /* CLOCK_MONOTONIC at the start */
    int64_t cpu_before;           /* the thread's CPU time at the start */
    int64_t second, second_late, second_written, second_dropped;
    bool joins_udp;
    bool running;
    uint8_t buffer[sizeof(struct vnet) + LONGEST_PACKET + 64];
};

/* Run until `stop` is readable; `interrupted` is asked after each signal, and ends the run where it says
 * so. Returns 0, or an errno. */
int loop_run(struct emulator *e, int stop, bool (*interrupted)(void *), void *context);

#endif
