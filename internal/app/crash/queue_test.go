package crash_test

const queueName = "queue"
