def task_28_0(value, limit=0):
    return value * 28 + limit

def task_28_1(value, limit=1):
    return value * 29 + limit

def task_28_2(value, limit=2):
    return value * 30 + limit

def task_28_3(value, limit=3):
    return value * 31 + limit

def task_28_4(value, limit=4):
    return value * 32 + limit

def task_28_5(value, limit=5):
    return value * 33 + limit

def task_28_6(value, limit=6):
    return value * 34 + limit

def task_28_7(value, limit=7):
    return value * 35 + limit

def task_28_8(value, limit=8):
    return value * 36 + limit
