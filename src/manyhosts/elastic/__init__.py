"""Continuing when workers are lost or come: the others keep their processes, model and optimizer.

One protocol for everything that workers do together, one rule: the state of the most advanced worker is taken by all
others. Imports run one way: training -> elastic -> communication.

* `session`: a script makes calls that all workers make together (`fit`, `test`, a trainer's making), numbered in order.
  From the first on, workers may go and come; one that comes late goes through the script from its beginning, gets
  the results of the calls that the others have finished, and joins them in the first that they have not.
* `work`: what a call is to those who take a worker through a change. A training has progress of its own; any other call
  is made again from its beginning (`RestartedCall`), so there all that were there are level.
* `rendezvous`: when a collective breaks, or all have heard that somebody waits to join, each worker

      1. cuts the connections of the group, so that no collective waits for ever, and cancels what is under way in it,
      2. asks the head who is left (`cluster.membership`), and joins them in a new group,
      3. reports how far it is: steps finished, what is done of what is due after them, whether it is new. The most
         advanced is right; of several that are level, the one of the lowest rank,
      4. ends the step that broke off: puts it back or, where another worker has finished it, finishes it,
      5. gets the state of the most advanced if it has fewer steps; a new one gets that of all trainers,
      6. agrees with the others on what each has of its own, and reads its part of each batch from there on.

  Where that breaks off, it begins again from 1. Rank 0 says what happened, in the records of the run.
* `state_transfer`: nested state from one worker to those that lack it, without pickle and without a disk.

Where the run does not continue, the head says so (`Refused`), and only snapshots are left: see
`training.last_snapshot`.
"""
