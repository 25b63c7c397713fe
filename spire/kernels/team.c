/* Placement of a team's threads. They wait for each other hundreds of times a step. Two of them on one processor
   take turns, each turn as long as one spins before it sleeps, and the scheduler may leave them there for whole
   steps while another processor is idle. */

#define _GNU_SOURCE
#include "kernels.h"

#ifdef HAVE_KERNELS
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MOST_THREADS 256

/* The team of the calling thread, which comes first. */
typedef struct {
  int threads, processor;
  pid_t ids[MOST_THREADS];
} Team;

static void meet(Team *team, int threads) {
  team->threads = threads, team->processor = -1;
#pragma omp parallel num_threads(threads)
  team->ids[omp_get_thread_num()] = (pid_t)syscall(SYS_gettid);
}

void keep_apart(int threads) {
  static __thread Team team;
  cpu_set_t allowed, one;
  if (threads < 2 || threads > MOST_THREADS) return;
  if (team.threads != threads) meet(&team, threads);
  const int here = sched_getcpu();
  if (here < 0 || here == team.processor) return;
  team.processor = here;
  if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) != threads) return;
  for (int helper = 1, other = 0; helper < threads && other < CPU_SETSIZE; other++)
    if (other != here && CPU_ISSET(other, &allowed)) {
      CPU_ZERO(&one);
      CPU_SET(other, &one);
      sched_setaffinity(team.ids[helper++], sizeof one, &one);
    }
}
#else
void keep_apart(int threads) {}
#endif
