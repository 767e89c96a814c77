// Copies between files and memory, made by threads of this library's own. Whoever starts a transfer goes on at once,
// and waits for its end later. The threads need no interpreter, so none of them waits for Python's lock.
//
// A transfer is a list of jobs, each a part of a file. Jobs are cut into tasks, which threads take from one queue. A
// task opens its file itself: so a process has no more files open than threads.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_THREADS 64
#define STACK_BYTES (1 << 20)
#define SHORT_BYTES (1 << 20)
// Errors, besides the numbers of errno: a file that ended too early, and rows that the device did not copy.
#define TOO_SHORT (-1)
#define NOT_COPIED (-2)

// `rows` rows of `nbytes` bytes, `apart` bytes from each other in the file, the first at `offset`. In memory they
// follow each other. Of a file whose bytes come from a device, `apart` is the size: past `nbytes` it holds zeros.
typedef struct {
    int64_t offset, nbytes, rows, apart;
} Job;

// Memory of a device, to which the rows of a transfer go on, or from which they come. The first six are functions of
// CUDA's driver, of which this library knows only the addresses: cuCtxSetCurrent, cuMemcpy2DAsync, cuEventRecord,
// cuEventCreate, cuEventQuery and cuMemHostRegister. In host memory a row has `width` bytes, of which `take` are
// copied, those past the first `skip`. The event is recorded after all rows that go on. `integers`: 0, or what these
// bytes are (`Integers`): then the largest magnitude of all that go on is found in `largest`. `step`: the most bytes
// that a thread has on their way at a time in a place of its own; 0: threads have none. `pinned`: whether the memory of
// the transfer is, so that a device can copy from it while the host goes on. `apart`: bytes on the device between the
// first rows of two jobs, where what is written comes from there.
typedef struct {
    int (*use)(void* context);
    int (*copy)(const void* what, void* stream);
    int (*record)(void* event, void* stream);
    int (*make)(void** event, unsigned flags);
    int (*query)(void* event);
    int (*pin)(void* memory, size_t nbytes, unsigned flags);
    void *context, *stream, *event;
    uint64_t there, pitch;
    int64_t integers;
    _Atomic uint64_t* largest;
    int64_t width, skip, take, step, pinned, apart;
} Device;

// The bytes of an integer, negative where it has a sign.
enum Integers { INT8 = -1, INT16 = -2, INT32 = -4, INT64 = -8, UINT8 = 1, UINT16 = 2, UINT32 = 4, UINT64 = 8 };

// CUDA_MEMCPY2D of CUDA's driver.
typedef struct {
    size_t source_x, source_y;
    int source_type;
    const void* source_host;
    uint64_t source_device;
    void* source_array;
    size_t source_pitch, target_x, target_y;
    int target_type;
    void* target_host;
    uint64_t target_device;
    void* target_array;
    size_t target_pitch, width, rows;
} Copy;

#define HOST 1
#define DEVICE 2
#define WITHOUT_TIME 2
#define FOR_ALL_DEVICES 1
#define NOT_READY 600

// A thread's own memory beside a device: two places for bytes that go there, and two for bytes that come. They are few
// and small, so that the bytes are still in the caches of the processors when they are copied on.
#define SENDING 2
#define PLACES 4
#define MOST_CONTEXTS 8
typedef struct {
    char* memory;    // pinned for all devices; NULL where there is none
    int64_t nbytes;  // of a place
    int asked;
    void* last[PLACES];  // the event after which a place is free; NULL where it was not used
    struct {
        void *context, *events[PLACES];
    } marks[MOST_CONTEXTS];
} Beside;

typedef struct Transfer Transfer;

typedef struct Task {
    struct Task* next;
    Transfer* transfer;
    const char* path;
    const Job* jobs;      // one that is cut, or several whole ones
    int64_t count;        // of jobs
    int64_t first, size;  // of a job that is cut: the first byte of its row, or its first row, and how many
    char* memory;
} Task;

struct Transfer {
    int flags, error;
    const char* memory;
    const Job* jobs;
    Device device;      // `take` is 0 where there is none
    atomic_int unsent;  // tasks whose rows have not been sent on
    atomic_int left;    // tasks that have not ended
    Task tasks[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
// Tasks that read, or tasks that write, in the order in which they came.
typedef struct {
    Task *head, **tail;
    int busy;  // threads that have one
} Queue;
static Queue queues[2] = {{NULL, &queues[0].head, 0}, {NULL, &queues[1].head, 0}};
static int threads, busy, asleep, queued, waiting, most_threads = MOST_THREADS;

// The number of this interface, which the loader compares: a library of another version is not used.
int transfers_version(void) { return 10; }

void transfers_limit(int count) { most_threads = count < MOST_THREADS ? count : MOST_THREADS; }

static int move(int file, int write, char* memory, int64_t nbytes, int64_t offset) {
    while (nbytes > 0) {
        ssize_t moved = write ? pwrite(file, memory, nbytes, offset) : pread(file, memory, nbytes, offset);
        if (moved < 0 && errno != EINTR) return errno;
        if (moved == 0) return TOO_SHORT;
        if (moved > 0) memory += moved, nbytes -= moved, offset += moved;
    }
    return 0;
}

// Moves `count` jobs, or a part of one. Jobs of one path that follow each other share a descriptor.
static int
carry_out(const char* path, const Job* job, int64_t count, int64_t first, int64_t size, int flags, char* memory) {
    int write = (flags & O_ACCMODE) != O_RDONLY, error = 0, file = -1;
    const char* opened = NULL;
    for (; count > 0 && !error; count--, job++, path += strlen(path) + 1) {
        if (!opened || strcmp(path, opened)) {
            if (file >= 0) close(file);
            file = open(path, flags | O_CLOEXEC, 0666);
            if (file < 0) return errno;
            opened = path;
        }
        int64_t rows = job->rows, nbytes = job->nbytes, offset = job->offset;
        if (size && rows == 1) offset += first, nbytes = size;
        if (size && rows > 1) offset += first * job->apart, rows = size;
        for (; rows > 0 && !error; rows--, offset += job->apart, memory += nbytes)
            error = move(file, write, memory, nbytes, offset);
    }
    if (file >= 0 && close(file) && write && !error) error = errno;
    return error;
}

static int64_t bytes_of(const Task* task) {
    if (task->size) return task->jobs->rows > 1 ? task->size * task->jobs->nbytes : task->size;
    int64_t nbytes = 0;
    for (int64_t i = 0; i < task->count; i++) nbytes += task->jobs[i].rows * task->jobs[i].nbytes;
    return nbytes;
}

// Returns how many bytes of lines of `line` bytes fit a place of this thread. Returns 0 where none does, or the thread
// gets no memory.
static int64_t step_of(Beside* own, const Device* device, int64_t line) {
    if (!device->step) return 0;
    if (!own->asked) {
        own->asked = 1, own->nbytes = device->step;
        char* memory = mmap(NULL, PLACES * own->nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED && !device->pin(memory, PLACES * own->nbytes, FOR_ALL_DEVICES)) own->memory = memory;
        else if (memory != MAP_FAILED) munmap(memory, PLACES * own->nbytes);
    }
    int64_t most = device->step < own->nbytes ? device->step : own->nbytes;
    return own->memory ? most / line * line : 0;
}

// Returns the event of a place in a context; NULL where there is none.
static void* mark(Beside* own, const Device* device, int place) {
    for (int i = 0; i < MOST_CONTEXTS; i++) {
        if (!own->marks[i].context) own->marks[i].context = device->context;
        if (own->marks[i].context != device->context) continue;
        void** event = &own->marks[i].events[place];
        if (!*event && device->make(event, WITHOUT_TIME)) *event = NULL;
        return *event;
    }
    return NULL;
}

// Defines a function that returns the largest magnitude of some bytes of integers.
#define OF_TYPE(INTEGERS, TYPE)                                     \
    case INTEGERS: {                                                \
        const TYPE* x = (const void*)memory;                        \
        TYPE least = 0, most = 0;                                   \
        for (int64_t i = 0; i < nbytes / (int64_t)sizeof *x; i++) { \
            least = x[i] < least ? x[i] : least;                    \
            most = x[i] > most ? x[i] : most;                       \
        }                                                           \
        below = -(uint64_t)least, above = (uint64_t)most;           \
        break;                                                      \
    }
#define LARGEST(NAME, FOR)                                                           \
    FOR static uint64_t NAME(int64_t integers, const char* memory, int64_t nbytes) { \
        uint64_t below = UINT64_MAX, above = 0; /* of a type not known here */       \
        switch (integers) {                                                          \
            OF_TYPE(INT8, int8_t)                                                    \
            OF_TYPE(INT16, int16_t)                                                  \
            OF_TYPE(INT32, int32_t)                                                  \
            OF_TYPE(INT64, int64_t)                                                  \
            OF_TYPE(UINT8, uint8_t)                                                  \
            OF_TYPE(UINT16, uint16_t)                                                \
            OF_TYPE(UINT32, uint32_t)                                                \
            OF_TYPE(UINT64, uint64_t)                                                \
        }                                                                            \
        return below > above ? below : above;                                        \
    }
LARGEST(largest_anywhere, )
#ifdef __x86_64__
LARGEST(largest_with_avx2, __attribute__((target("avx2"))))
#endif

static uint64_t largest_of(int64_t integers, const char* memory, int64_t nbytes) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) return largest_with_avx2(integers, memory, nbytes);
#endif
    return largest_anywhere(integers, memory, nbytes);
}

// Looks at what goes on of `rows` rows of integers. They are still in the caches of the processor that has read them.
static void look_at(const Device* device, const char* memory, int64_t rows) {
    int whole = device->take == device->width;
    int64_t nbytes = whole ? device->take * rows : device->take;
    uint64_t found = 0;
    for (int64_t row = 0; row < (whole ? 1 : rows); row++) {
        uint64_t one = largest_of(device->integers, memory + row * device->width + device->skip, nbytes);
        found = one > found ? one : found;
    }
    uint64_t before = atomic_load(device->largest);
    while (found > before && !atomic_compare_exchange_weak(device->largest, &before, found)) continue;
}

// Copies `rows` rows between `memory` and the device, where they are rows of the transfer from `first` on.
static int copy_rows(const Device* device, char* memory, int64_t first, int64_t rows, int to_device) {
    char* here = memory + device->skip;
    size_t width = (size_t)device->width;
    uint64_t there = device->there + first * device->pitch, pitch = device->pitch;
    size_t take = device->take;
    if (take == width && width == pitch) take = width = pitch = take * rows, rows = 1;  // without gaps
    // The driver takes of each side the address that its type asks for.
    const Copy copy = {.source_type = to_device ? HOST : DEVICE,
                       .source_host = here,
                       .source_device = there,
                       .source_pitch = to_device ? width : pitch,
                       .target_type = to_device ? DEVICE : HOST,
                       .target_host = here,
                       .target_device = there,
                       .target_pitch = to_device ? pitch : width,
                       .width = take,
                       .rows = rows};
    return device->copy(&copy, device->stream) ? NOT_COPIED : 0;
}

// Returns the number of a place for bytes that go to the device, if one is free. Otherwise returns SENDING, or waits
// where bytes can go there from no other place.
static int free_place(const Beside* own, const Device* device) {
    const struct timespec pause = {0, 20000};
    for (;; nanosleep(&pause, NULL)) {
        for (int place = 0; place < SENDING; place++)
            if (!own->last[place] || device->query(own->last[place]) != NOT_READY) return place;
        if (device->pinned) return SENDING;
    }
}

// Reads the bytes of a task in steps, sends each on, and records the event after those of the last task. Several jobs are
// one step. A step of a task that is not short takes a place of this thread if one is free. Otherwise it takes its own
// place in the memory of the transfer, or waits where that is not pinned.
static int pass_on(Transfer* transfer, const Task* task, Beside* own) {
    const Device* device = &transfer->device;
    const Job* job = task->jobs;
    int64_t unit = job->rows > 1 ? job->nbytes : 1, size = bytes_of(task), step = 0;
    if (device->use(device->context)) return NOT_COPIED;
    int64_t least = device->step < SHORT_BYTES ? device->step : SHORT_BYTES;
    if (2 * size >= least || !device->pinned) step = step_of(own, device, unit > device->width ? unit : device->width);
    if (task->count > 1 && step < size) step = 0;
    int places = step ? SENDING : 0;
    if (!step || step > size) step = size;
    for (int64_t at = 0; at < size; at += step) {
        int64_t nbytes = size - at < step ? size - at : step;
        char* memory = task->memory + at;
        int place = places ? free_place(own, device) : SENDING;
        void* event = place < SENDING ? mark(own, device, place) : NULL;
        if (event) own->last[place] = event, memory = own->memory + place * own->nbytes;
        int error =
            step == size
                ? carry_out(task->path, job, task->count, task->first, task->size, transfer->flags, memory)
                : carry_out(task->path, job, 1, task->first + at / unit, nbytes / unit, transfer->flags, memory);
        int64_t first = (task->memory - transfer->memory + at) / device->width;
        if (!error && device->integers) look_at(device, memory, nbytes / device->width);
        if (!error) error = copy_rows(device, memory, first, nbytes / device->width, 1);
        if (error) return error;
        if (event && device->record(event, device->stream)) return NOT_COPIED;
    }
    int is_last = atomic_fetch_sub(&transfer->unsent, 1) == 1;
    return is_last && device->record(device->event, device->stream) ? NOT_COPIED : 0;
}

// Waits until a place of this thread is free.
static int settle(const Beside* own, const Device* device, int place) {
    int status = 0;
    while (own->last[place] && (status = device->query(own->last[place])) == NOT_READY) sched_yield();
    return status ? NOT_COPIED : 0;
}

// Sets to zero what follows in each row of `nbytes` bytes that came from the device, where rows in the file are longer.
static void fill_up(const Device* device, char* memory, int64_t nbytes) {
    if (device->take == device->width) return;
    for (char* row = memory; row < memory + nbytes; row += device->width)
        memset(row + device->take, 0, (size_t)(device->width - device->take));
}

// Writes a file whose bytes come from the device, in steps: while one is written, the next one is on its way.
static int bring(const Transfer* transfer, const Task* task, Beside* own) {
    Device there = transfer->device;
    there.there += (task->jobs - transfer->jobs) * there.apart;
    const Device* device = &there;
    int64_t size = bytes_of(task), step;
    if (device->use(device->context) || !(step = step_of(own, device, device->width))) return NOT_COPIED;
    int file = open(task->path, transfer->flags | O_CLOEXEC, 0666), error = file < 0 ? errno : 0;
    for (int64_t at = 0; at < size + step && !error; at += step) {
        int turn = at / step % 2, place = SENDING + turn, before = SENDING + !turn;
        if (at < size) {
            void* event = mark(own, device, place);
            if ((error = settle(own, device, place))) break;
            int64_t nbytes = size - at < step ? size - at : step;
            error = event ? copy_rows(device, own->memory + place * own->nbytes, at / device->width,
                                      nbytes / device->width, 0)
                          : NOT_COPIED;
            if (!error && device->record(event, device->stream)) error = NOT_COPIED;
            if (!error) own->last[place] = event;
        }
        if (at > 0 && !error && !(error = settle(own, device, before))) {
            int64_t first = at - step, nbytes = size - first < step ? size - first : step;
            fill_up(device, own->memory + before * own->nbytes, nbytes);
            error = move(file, 1, own->memory + before * own->nbytes, nbytes, first);
        }
    }
    if (!error && task->jobs->apart > size && ftruncate(file, task->jobs->apart)) error = errno;
    if (file >= 0 && close(file) && !error) error = errno;
    return error;
}

// Returns the queue from which a thread takes its next task; NULL where both are empty. While there is something to
// read, at most half of the threads write: a device waits for what is read, and for what is written much later. The
// lock is held.
static Queue* next_queue(void) {
    Queue *reads = &queues[0], *writes = &queues[1];
    if (writes->head && (!reads->head || writes->busy < threads / 2)) return writes;
    return reads->head ? reads : NULL;
}

static void* work(void* unused) {
    (void)unused;
    Beside own = {0};
    pthread_mutex_lock(&lock);
    for (;;) {
        Queue* queue;
        while (!(queue = next_queue())) {
            asleep++;
            pthread_cond_wait(&begun, &lock);
            asleep--;
        }
        Task* task = queue->head;
        if (!(queue->head = task->next)) queue->tail = &queue->head;
        queued--, busy++, queue->busy++;
        pthread_mutex_unlock(&lock);
        Transfer* transfer = task->transfer;
        int write = queue == &queues[1];
        int error = !transfer->device.take ? carry_out(task->path, task->jobs, task->count, task->first, task->size,
                                                       transfer->flags, task->memory)
                    : write                ? bring(transfer, task, &own)
                                           : pass_on(transfer, task, &own);
        pthread_mutex_lock(&lock);
        busy--, queue->busy--;
        if (error) transfer->error = error;
        // The one that waits may free the transfer as soon as nothing of it is left.
        if (atomic_fetch_sub(&transfer->left, 1) == 1 && waiting) pthread_cond_broadcast(&ended);
    }
    return NULL;
}

// Starts a thread that gets no signals: Python's main thread is to have them. The lock is held.
static void start_thread(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    if (!pthread_create(&thread, &attributes, work, NULL)) threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static int64_t cut_size(const Job* job, int64_t parts, int64_t step) {
    int64_t all = job->rows > 1 ? job->rows : job->nbytes;
    if (job->rows > 1) step = 1;
    int64_t size = (all + parts - 1) / parts;
    return (size + step - 1) / step * step;
}

// Starts a transfer of `count` jobs, whose bytes follow each other in `memory`. `paths`: their paths, each with a zero
// byte at its end. `flags`: those of open(). `parts`: in how many parts each job is cut; where it is 1, a task has
// `together` jobs. `device`: where each part goes on to as soon as it is there, or where what is written comes from,
// which then needs no `memory`; NULL: there is none. What is pointed to must stay until `transfers_end`, but for `device`. Returns NULL where there is no memory or no thread for it.
Transfer* transfers_start(const char* paths, const Job* jobs, int64_t count, int flags, char* memory, int64_t parts,
                          int64_t together, const Device* device) {
    int64_t step = device ? device->width : sysconf(_SC_PAGESIZE), tasks = 0;
    for (int64_t i = 0; i < count; i += together) {
        int64_t all = jobs[i].rows > 1 ? jobs[i].rows : jobs[i].nbytes, size = cut_size(&jobs[i], parts, step);
        tasks += parts == 1 || !all ? 1 : (all + size - 1) / size;
    }
    Transfer* transfer = malloc(sizeof(Transfer) + tasks * sizeof(Task));
    if (!transfer) return NULL;
    transfer->flags = flags, transfer->error = 0, transfer->memory = memory, transfer->jobs = jobs;
    transfer->device = device ? *device : (Device){0};
    atomic_init(&transfer->unsent, (int)tasks);
    atomic_init(&transfer->left, (int)tasks);
    Task* task = transfer->tasks;
    for (int64_t i = 0; i < count; i += together) {
        const Job* job = &jobs[i];
        int64_t all = job->rows > 1 ? job->rows : job->nbytes, some = count - i < together ? count - i : together;
        if (parts == 1 || !all) *task++ = (Task){NULL, transfer, paths, job, some, 0, 0, memory};
        else {
            int64_t size = cut_size(job, parts, step), each = job->rows > 1 ? job->nbytes : 1;
            for (int64_t first = 0; first < all; first += size)
                *task++ = (Task){NULL,
                                 transfer,
                                 paths,
                                 job,
                                 1,
                                 first,
                                 all - first < size ? all - first : size,
                                 memory + first * each};
        }
        for (int64_t n = 0; n < some; n++, paths += strlen(paths) + 1)
            if (memory) memory += job[n].rows * job[n].nbytes;
    }
    pthread_mutex_lock(&lock);
    for (int had = -1; had < threads && threads < most_threads && threads - busy < queued + tasks;) {
        had = threads;
        start_thread();
    }
    int wakes = tasks < asleep ? (int)tasks : asleep, there = threads;
    Queue* queue = &queues[(flags & O_ACCMODE) != O_RDONLY];
    for (int64_t i = 0; there && i < tasks; i++) {
        *queue->tail = &transfer->tasks[i];
        queue->tail = &transfer->tasks[i].next;
        queued++;
    }
    pthread_mutex_unlock(&lock);
    if (!there) {
        free(transfer);
        return NULL;
    }
    for (; wakes > 0; wakes--) pthread_cond_signal(&begun);
    return transfer;
}

// Whether a transfer has ended, so that `transfers_end` does not wait.
int transfers_ended(Transfer* transfer) { return !atomic_load(&transfer->left); }

// Waits for the end of a transfer and frees it. Returns 0 if all bytes were moved.
int transfers_end(Transfer* transfer) {
    pthread_mutex_lock(&lock);
    waiting++;
    while (atomic_load(&transfer->left)) pthread_cond_wait(&ended, &lock);
    waiting--;
    pthread_mutex_unlock(&lock);
    int error = transfer->error;
    free(transfer);
    return error;
}

// Makes a transfer on the calling thread. Returns 0 if all bytes were moved.
int transfers_make(const char* paths, const Job* jobs, int64_t count, int flags, char* memory) {
    return carry_out(paths, jobs, count, 0, 0, flags, memory);
}
